package oci

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The runtime handlers of a node, their features in the status, and the configuration of each.
func TestHandlers(t *testing.T) {
	c := &Config{Handlers: []string{"edge", "runc", "", "edge"}}
	for want, refused := range map[string]bool{"": false, "keelson": false, "runc": false, "edge": false,
		"gvisor": true, "Runc": true, "kee": true} {
		err := c.checkHandler(want, &cri.PodSandboxMetadata{Namespace: "ns", Name: "p"})
		if (err != nil) != refused {
			t.Errorf("%q: %v", want, err)
		}
		if err != nil && (!strings.Contains(err.Error(), fmt.Sprintf("handler %q", want)) ||
			!strings.Contains(err.Error(), "pod ns/p") ||
			!strings.Contains(err.Error(), "the node has keelson, runc, edge:")) {
			t.Errorf("the refusal does not explain itself: %v", err)
		}
	}
	var names []string
	for _, h := range c.describeHandlers() {
		names = append(names, fmt.Sprintf("%q", h.Name))
		if h.Features.UserNamespaces || !h.Features.RecursiveReadOnlyMounts {
			t.Errorf("%q: %v", h.Name, h.Features)
		}
	}
	if got := strings.Join(names, " "); got != `"" "keelson" "runc" "edge"` {
		t.Errorf("told: %s", got)
	}
	if _, err := ParseHandler("gvisor=/usr/local/bin/runsc"); err == nil ||
		!strings.Contains(err.Error(), "starts no other OCI runtime") {
		t.Errorf("a program of somebody else's: %v", err)
	}
	if name, err := ParseHandler("edge"); name != "edge" || err != nil {
		t.Errorf("a name: %q, %v", name, err)
	}
}

// A sandbox keeps its handler across agent restarts, also if the node no longer has the handler. A
// request with an unknown handler leaves nothing.
func TestSandboxHandler(t *testing.T) {
	r := newRig(t)
	_, like := r.runSandbox()
	ask := func(name, handler string) (string, error) {
		c := &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: name, Namespace: "ns", Uid: "uid-" + name},
			LogDirectory: like.LogDirectory,
			Linux: &cri.LinuxPodSandboxConfig{CgroupParent: "/pod-" + name,
				SecurityContext: like.GetLinux().GetSecurityContext()}}
		res, err := r.RunPodSandbox(r.ctx(), &cri.RunPodSandboxRequest{Config: c, RuntimeHandler: handler})
		return res.GetPodSandboxId(), err
	}
	if _, err := ask("boxed", "gvisor"); err == nil || !strings.Contains(err.Error(), `handler "gvisor"`) {
		t.Errorf("gvisor: %v", err)
	}
	if left, err := os.ReadDir(r.paths.sandboxDir("")); err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
	for _, dir := range r.cgroups.CgroupPaths("pod-boxed") {
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s was made", filepath.Base(dir))
		}
	}
	id, err := ask("plain", "runc")
	if err != nil {
		t.Fatal(err)
	}
	r.restartRuntime()
	st, err := r.PodSandboxStatus(r.ctx(), &cri.PodSandboxStatusRequest{PodSandboxId: id})
	if err != nil || st.Status.RuntimeHandler != "runc" {
		t.Errorf("after a restart: %v, %v", st.GetStatus().GetRuntimeHandler(), err)
	}
}
