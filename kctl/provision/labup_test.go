package provision

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"keelson.dev/keelson/deploy/lab"
)

// A flag that was given and says otherwise than the lab that is there was made is refused by its name; one that was not given,
// or says the same, is not. Every flag of 'lab up' is compared.
func TestFlagsOfALabThatIsThere(t *testing.T) {
	dir := t.TempDir()
	is := lab.Config{
		ControlPlanes: 3, Workers: 2, Listen: "127.0.0.1:7443", BinDir: "/b", CNIBinDir: "/b/cni",
		ImageDir: "/b/images", CPU: "2",
		Memory: "1Gi", EvictionSeconds: 7, Kubeconfig: "/k/config", ControlPlaneFiles: dir,
		ControlPlaneFlags: []string{"--a=1", "--b"},
	}
	same := map[string][]string{
		"control-planes": {"3"}, "standbys": {"0"}, "workers": {"2"}, "listen": {"127.0.0.1:7443"}, "bin-dir": {"/b/"},
		"cni-bin-dir": {"/b/cni"},
		"image-dir":   {"/b/../b/images"}, "cpu": {"2"}, "memory": {"1Gi"}, "eviction-seconds": {"7"},
		"kubeconfig-out":      {"/k/config"},
		"control-plane-files": {dir}, "control-plane-flag": {"--a=1", "--b"}, "links": {"1"}, "families": {"ipv4"},
		"pod-network": {"auto"},
	}
	other := map[string][]string{
		"control-planes": {"1"}, "standbys": {"1"}, "workers": {"5"}, "listen": {"127.0.0.1:6443"}, "bin-dir": {"/c"},
		"cni-bin-dir": {"/b"},
		"image-dir":   {"/"}, "cpu": {"4"}, "memory": {"2Gi"}, "eviction-seconds": {"8"},
		"kubeconfig-out":      {"/k/other"},
		"control-plane-files": {t.TempDir()}, "control-plane-flag": {"--a=1"}, "links": {"2"}, "families": {"dual"},
		"pod-network": {"vxlan"},
	}
	refused := func(given map[string][]string) error {
		var cfg lab.Config
		c := &cobra.Command{}
		labUpFlags(c.Flags(), &cfg)
		for name, values := range given {
			for _, v := range values {
				if err := c.Flags().Set(name, v); err != nil {
					t.Fatal(err)
				}
			}
		}
		wanted, err := lab.New(cfg, nil)
		if err != nil {
			t.Fatal(err)
		}
		return checkUnchangedFlags(is, wanted.Config, c.Flags())
	}
	if err := refused(nil); err != nil {
		t.Errorf("without flags: %v", err)
	}
	if err := refused(same); err != nil {
		t.Errorf("with the flags that it was made with: %v", err)
	}
	for name := range other {
		err := refused(map[string][]string{name: other[name]})
		if err == nil || !strings.Contains(err.Error(), "--"+name+" ") ||
			!strings.Contains(err.Error(), "kctl lab down") {
			t.Errorf("--%s %v: %v", name, other[name], err)
		}
	}
	all := labUp(genericiooptions.NewTestIOStreamsDiscard()).Flags()
	for name := range other {
		if all.Lookup(name) == nil {
			t.Errorf("'lab up' has no flag --%s", name)
		}
	}
	count := 0
	all.VisitAll(func(*pflag.Flag) { count++ })
	if count != len(other) {
		t.Errorf("'lab up' has %d flags, %d are compared", count, len(other))
	}
}

// A lab that a person can have again is started again; what cannot be, and what a run of tests has left, makes room.
func TestUselessLabs(t *testing.T) {
	for name, c := range map[string]struct {
		found lab.Found
		want  bool
	}{
		"none":                          {lab.Found{}, false},
		"a person's that is down":       {lab.Found{State: lab.Down}, false},
		"a person's that runs":          {lab.Found{State: lab.Running}, false},
		"unfinished":                    {lab.Found{State: lab.Unfinished}, true},
		"down, of a run that has ended": {lab.Found{State: lab.Down, Test: true}, true},
		"down, of a run that goes on": {lab.Found{State: lab.Down, Test: true,
			Lab: &lab.Lab{Config: lab.Config{Maker: lab.ProcessOf(os.Getpid())}}}, false},
		"that runs, of a run that ended": {lab.Found{State: lab.Running, Test: true}, false},
	} {
		if c.found.Lab == nil {
			c.found.Lab = &lab.Lab{}
		}
		if got := rebuildReason(c.found) != ""; got != c.want {
			t.Errorf("%s: taken away: %t, want %t", name, got, c.want)
		}
	}
}

// A lab that $KEELSON_LAB names is the cluster of every command, also while $KUBECONFIG names another lab of this machine.
// A $KUBECONFIG that names another cluster stays.
func TestNamedLabIsTheCluster(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv(lab.NameEnv, "second")
	first := filepath.Join(home, ".kube", "keelson-lab")
	// The root of this process' lab does not depend on the variable, which is read at the start.
	own := LabKubeconfig()
	if err := os.MkdirAll(filepath.Dir(own), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(own, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for set, want := range map[string]string{"": own, first: own, first + "@third": own,
		"/etc/prod.conf": "/etc/prod.conf",
		first + "-copy":  first + "-copy"} {
		t.Setenv("KUBECONFIG", set)
		if SelectLabKubeconfig(); os.Getenv("KUBECONFIG") != want {
			t.Errorf("KUBECONFIG=%q with %s=second: got %q, want %q", set, lab.NameEnv, os.Getenv("KUBECONFIG"), want)
		}
	}
}
