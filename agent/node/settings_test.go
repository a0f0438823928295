package node

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"keelson.dev/keelson/internal/settings"
)

func parseConfig(t *testing.T, file string, args ...string) (*Config, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	fs := pflag.NewFlagSet("keelson-agent", pflag.ContinueOnError)
	fs.SetOutput(io.Discard)
	c := Flags(fs)
	apply := WithConfigFile(fs)
	if err := fs.Parse(append(args, "--config="+path)); err != nil {
		t.Fatal(err)
	}
	return c, apply()
}

func TestSettingsOfTheFile(t *testing.T) {
	c, err := parseConfig(t, `
server: [192.0.2.11:6444, 192.0.2.12:6444]
node-name: w1
token-file: /var/lib/keelson/token
max-pods: 50
local-volumes: false
fence-after: 30s
node-labels: [disk=fast, zone=a]
taints: ["dedicated=db:NoSchedule"]
registry-mirror: ["*=mirror.example.com"]
wireguard-port: 51821
`, "--max-pods=60", "--server=192.0.2.13:6444")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(c.Join.Servers, []string{"192.0.2.13:6444"}) || c.Node.MaxPods != 60 {
		t.Errorf("servers %v and %d pods: want those of the flags alone", c.Join.Servers, c.Node.MaxPods)
	}
	if c.NodeName != "w1" || c.Storage.LocalVolumes || c.Storage.FenceAfter.Seconds() != 30 ||
		c.Node.Labels["disk"] != "fast" ||
		c.Node.Labels["zone"] != "a" ||
		len(c.Node.Taints) != 1 || c.Registries.Mirrors["*"] == nil || c.PodNetwork.wireguard.Port != 51821 ||
		c.Join.TokenFile != "/var/lib/keelson/token" {
		t.Errorf("the file has no effect: %+v", c)
	}
	for file, want := range map[string]string{
		"taints: [nothing]":    "line 1: taints: ",
		"nodelabels: [a=b]":    "the nearest is node-labels",
		"server: 192.0.2.11":   "line 1: server: want a list",
		"kubelet-port: 100000": "line 1: kubelet-port: ",
		"verbose: true":        "unknown key", // the program declares it, not package node
	} {
		if _, err := parseConfig(t, file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", file, err, want)
		}
	}
}

// The node's API shows the values of all flags from all sources, without the token.
func TestSettingsAreShown(t *testing.T) {
	const token = "keelson1.node.c2VjcmV0"
	path := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(path,
		[]byte("server: [192.0.2.11:6444, 192.0.2.12:6444]\nproxy-mode: ipvs\nmax-pods: 50\nnode-labels: [disk=fast, "+
			"zone=a]\ntoken: "+token), 0o600); err != nil {
		t.Fatal(err)
	}
	fs := pflag.NewFlagSet("keelson-agent", pflag.ContinueOnError)
	c := Flags(fs)
	apply := WithConfigFile(fs)
	err := fs.Parse([]string{"--max-pods=60", "--registry-mirror=*=m1.example.com",
		"--registry-mirror=*=m2.example.com", "--config=" + path})
	if err = errors.Join(err, apply()); err != nil {
		t.Fatal(err)
	}
	c.Release, c.Diagnostics.Settings = "v9", FlagValues(fs)
	got := string(c.settingsText())
	for _, want := range []string{"release: v9\n", "\nserver: 192.0.2.11:6444,192.0.2.12:6444\n",
		"\nproxy-mode: ipvs\n", "\nmax-pods: 60\n", "\nnode-labels: disk=fast,zone=a\n",
		"\nregistry-mirror: *=m1.example.com,*=m2.example.com\n", "\ntoken: (left out)\n", "\nfence-after: 20s\n",
		"\nconfig: " + path + "\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("it does not say %q", want)
		}
	}
	if strings.Contains(got, token) || t.Failed() {
		t.Errorf("it says\n%s", got)
	}
}

// A repeatable flag is a list in the file.
func TestWhichKeysAreLists(t *testing.T) {
	fs := pflag.NewFlagSet("keelson-agent", pflag.ContinueOnError)
	Flags(fs)
	WithConfigFile(fs)
	fs.VisitAll(func(f *pflag.Flag) {
		_, several := f.Value.(stringList)
		several = several || strings.Contains(f.Usage, "repeatable") || strings.Contains(f.Usage, ",...")
		if k, ok := flagKinds[f.Name]; several && !ok || ok && !several && k == settings.List {
			t.Errorf("--%s can be given several times: %v; its key is a list: %v", f.Name, several, ok)
		}
		if f.Name != "config" && !strings.Contains(f.Usage, "[key "+f.Name+", "+settings.EnvironmentName(f.Name)+"]") {
			t.Errorf("--%s does not say how it is called elsewhere: %s", f.Name, f.Usage)
		}
	})
	for name := range flagKinds {
		if fs.Lookup(name) == nil {
			t.Errorf("there is no --%s", name)
		}
	}
}

// F110: with --local-volumes=false no local volume driver runs, and nothing else is missing.
func TestLocalVolumesLeftOut(t *testing.T) {
	parts := func(args ...string) (names []string) {
		c, err := parseConfig(t, "node-name: w1", args...)
		if err != nil {
			t.Fatal(err)
		}
		cfg, _, _ := fakeConfig("w1", t.TempDir())
		cfg.Parts.Volumes, cfg.Storage.LocalVolumes = nil, c.Storage.LocalVolumes
		n, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range n.parts {
			names = append(names, p.Name)
		}
		return names
	}
	const driver = "local volumes"
	with, without := parts(), parts("--local-volumes=false")
	if !slices.Contains(with, driver) || slices.Contains(without, driver) || !slices.Contains(without, "csi") {
		t.Errorf("with the driver %q, without %q", with, without)
	}
	if rest := slices.DeleteFunc(with, func(s string) bool { return s == driver }); !slices.Equal(rest, without) {
		t.Errorf("with the driver %q, without %q", with, without)
	}
}
