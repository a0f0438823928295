package oci

import (
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A container with an AppArmor profile that is not loaded does not start, with the reason. Without
// a profile it runs unconfined.
func TestAppArmor(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	c := r.containerConfig("confined", "true", func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.Apparmor = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost,
			LocalhostRef: "no-such"}
	})
	want := "is not loaded on this node"
	if !r.host.AppArmor {
		want = "AppArmor is not enabled on this node"
	}
	out, err := r.CreateContainer(r.ctx(), &cri.CreateContainerRequest{PodSandboxId: sb, Config: c, SandboxConfig: sc})
	if err == nil {
		_, err = r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: out.ContainerId})
	}
	if err == nil || !strings.Contains(err.Error(), `AppArmor profile "no-such"`) ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("a profile that is not there: %v, want %q", err, want)
	}
	if !r.host.AppArmor {
		t.Log("the kernel has no AppArmor: that of test/qemuguest has it")
		return
	}
	for name, ref := range map[string]*cri.SecurityProfile{"unsaid": nil,
		"said":  {ProfileType: cri.SecurityProfile_Unconfined},
		"named": {ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "unconfined"}} {
		r.runToEnd(sb, sc, name, "cat /proc/self/attr/apparmor/current || cat /proc/self/attr/current",
			func(c *cri.ContainerConfig) {
				c.Linux.SecurityContext.Apparmor = ref
			})
		r.expectLines(name, "stdout F unconfined")
	}
}
