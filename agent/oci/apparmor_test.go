package oci

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A profile that is not loaded into the kernel is rejected, with its name in the error.
func TestAppArmorProfiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "profiles")
	if err := os.WriteFile(file, []byte("/usr/bin/man (enforce)\nk8s-app (complain)\nwith space (v2) (enforce)\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h := hostFacts{apparmor: true, profiles: file}
	for profile, want := range map[string]string{"k8s-app": "", "/usr/bin/man": "", "with space (v2)": "", "unconfined": "", ":other://app": "",
		"k8s": "is not loaded", "": "is not loaded", "with space": "is not loaded"} {
		if err := h.hasAppArmor(profile); want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", profile, err, want)
		}
	}
	h.profiles += "x"
	if err := h.hasAppArmor("k8s-app"); err == nil || !strings.Contains(err.Error(), "securityfs") {
		t.Errorf("without a list: %v", err)
	}
}

// A container with an AppArmor profile that is not loaded does not start, with the reason. Without
// a profile it runs unconfined.
func TestAppArmor(t *testing.T) {
	r := newRig(t)
	sb, sc := r.sandbox()
	c := r.containerConfig("confined", "true", func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.Apparmor = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "no-such"}
	})
	want := "is not loaded on this node"
	if !r.host.apparmor {
		want = "AppArmor is not enabled on this node"
	}
	out, err := r.CreateContainer(r.ctx(), &cri.CreateContainerRequest{PodSandboxId: sb, Config: c, SandboxConfig: sc})
	if err == nil {
		_, err = r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: out.ContainerId})
	}
	if err == nil || !strings.Contains(err.Error(), `AppArmor profile "no-such"`) || !strings.Contains(err.Error(), want) {
		t.Errorf("a profile that is not there: %v, want %q", err, want)
	}
	if !r.host.apparmor {
		t.Log("the kernel has no AppArmor: that of test/qemuguest has it")
		return
	}
	for name, ref := range map[string]*cri.SecurityProfile{"unsaid": nil, "said": {ProfileType: cri.SecurityProfile_Unconfined},
		"named": {ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "unconfined"}} {
		r.output(sb, sc, name, "cat /proc/self/attr/apparmor/current || cat /proc/self/attr/current", func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.Apparmor = ref
		})
		r.expectLines(name, "stdout F unconfined")
	}
}
