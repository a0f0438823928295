package containerspec

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// CDI devices are read from specification files; the later directory takes precedence. Their edits
// appear in the OCI configuration. An unknown device or unreadable file is an error that names it.
func TestCDI(t *testing.T) {
	etc, run := t.TempDir(), t.TempDir()
	describe := func(dir, file, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	describe(etc, "gpu.yaml", `{cdiVersion: 0.6.0, kind: example.com/gpu, devices: [{name: "0", containerEdits: {env: `+
		`[FROM=etc]}}, {name: "1", containerEdits: {env: [ONE=1]}}]}`)
	describe(run, "gpu.json",
		`{"cdiVersion": "0.6.0", "kind": "example.com/gpu", "devices": [{"name": "0", "containerEdits": {"env": ["FROM=run"],
		"deviceNodes": [{"path": "/dev/null", "hostPath": "/dev/null"}], "mounts": [{"hostPath": "/lib", "containerPath": "/opt/lib", "options": ["ro", "bind"]}],
		"hooks": [{"hookName": "createContainer", "path": "/bin/hook"}]}}]}`)
	with := func(dirs []string, names ...string) (*specs.Spec, error) {
		in := &Input{Config: &cri.ContainerConfig{}, Dirs: Directories{CDI: dirs}}
		for _, n := range names {
			in.Config.CDIDevices = append(in.Config.CDIDevices, &cri.CDIDevice{Name: n})
		}
		s := &specs.Spec{Process: &specs.Process{},
			Linux: &specs.Linux{Resources: &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false,
				Access: "rwm"}}}}}
		return s, in.addCDI(s)
	}
	both := []string{etc, run}
	s, err := with(both, "example.com/gpu=0", "example.com/gpu=1")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(s.Process.Env, "FROM=run") || !slices.Contains(s.Process.Env, "ONE=1") ||
		slices.Contains(s.Process.Env, "FROM=etc") {
		t.Errorf("environment %v", s.Process.Env)
	}
	if len(s.Linux.Devices) != 1 || s.Linux.Devices[0].Path != "/dev/null" || len(s.Linux.Resources.Devices) != 2 ||
		!s.Linux.Resources.Devices[1].Allow {
		t.Errorf("devices %+v, %+v", s.Linux.Devices, s.Linux.Resources.Devices)
	}
	if len(s.Mounts) != 1 || s.Mounts[0].Destination != "/opt/lib" || s.Hooks == nil ||
		len(s.Hooks.CreateContainer) != 1 {
		t.Errorf("mounts %+v, hooks %+v", s.Mounts, s.Hooks)
	}
	noted := &Input{Dirs: Directories{CDI: both},
		Config: &cri.ContainerConfig{Annotations: map[string]string{
			"cdi.k8s.io/plugin": "example.com/gpu=1,example.com/gpu=0", "example.com/x": "y"},
			CDIDevices: []*cri.CDIDevice{{Name: "example.com/gpu=0"}}}}
	if s := (&specs.Spec{Process: &specs.Process{}}); noted.addCDI(s) != nil ||
		fmt.Sprint(s.Process.Env) != "[FROM=run ONE=1]" {
		t.Errorf("named in an annotation: %v", s.Process.Env) // F92
	}
	noted.Config.Annotations["cdi.k8s.io/plugin"] = "../../etc/shadow"
	if err := noted.addCDI(&specs.Spec{}); err == nil {
		t.Error("an annotation that names no device")
	}
	if s, err := with(nil); err != nil || len(s.Process.Env) > 0 {
		t.Errorf("no devices: %v, %v", s.Process.Env, err)
	}
	if _, err := with(both, "example.com/gpu=7"); err == nil || !strings.Contains(err.Error(), "example.com/gpu=7") {
		t.Errorf("a device that nobody describes: %v", err)
	}
	describe(run, "broken.json", "{")
	if _, err := with(both, "example.com/gpu=0"); err != nil {
		t.Errorf("beside a broken file: %v", err)
	}
	for i := range maxCDIFiles {
		describe(run, fmt.Sprint(i, ".yaml"), "")
	}
	if _, err := with(both, "example.com/gpu=0"); err == nil ||
		!strings.Contains(err.Error(), "exceed the limit of 1024 files and 8388608 bytes") {
		t.Errorf("too many files: %v", err)
	}
	big := t.TempDir()
	describe(big, "big.json", strings.Repeat(" ", maxCDIBytes+1))
	if _, err := with([]string{big}, "example.com/gpu=0"); err == nil ||
		!strings.Contains(err.Error(), "exceed the limit") {
		t.Errorf("too large a file: %v", err)
	}
}
