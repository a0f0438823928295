package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"keelson.dev/keelson/agent"
)

// more builds further plugins of the CNI project and returns their folder: before the test's thread has no network any more.
// That of flannel left the project after 0.9.1, and is fetched.
func more(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, p := range names {
		args := []string{"build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(dir, filepath.Base(p)),
			"github.com/containernetworking/plugins/" + p}
		fetched := strings.Contains(p, "@")
		if fetched {
			args = []string{"install", "-trimpath", "-ldflags=-s -w", "github.com/containernetworking/plugins/" + p}
		}
		cmd := exec.Command("go", args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOBIN="+dir)
		if out, err := cmd.CombinedOutput(); err != nil && fetched {
			t.Skipf("%s cannot be fetched: %v\n%s", p, err, out)
		} else if err != nil {
			t.Fatalf("building %s: %v\n%s", p, err, out)
		}
	}
	return dir
}

// install adds a folder of plugins.
func (h *host) install(dir string) {
	h.cfg.BinDirs = append(h.cfg.BinDirs, dir)
	h.Network = New(h.cfg)
}

// configure puts a configuration into the folder of network configurations, "" takes it away.
func (h *host) configure(name, text string) {
	h.Helper()
	path := filepath.Join(h.cfg.ConfDir, name)
	err := os.WriteFile(path, []byte(text), 0o644)
	if text == "" {
		err = os.Remove(path)
	}
	if err != nil {
		h.fail("%v", err)
	}
}

// ipam is host-local with addresses of a prefix in the test's own folder.
func (h *host) ipam(prefix string) string {
	return fmt.Sprintf(`{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":%q}]],"routes":[{"dst":"0.0.0.0/0"}]}`,
		filepath.Join(h.dir, "theirs"), prefix)
}

// F109: a configuration of somebody else works by its file alone, with a cable to the host (ptp), addresses on its uplink
// (macvlan, static) and flannel's, which hands on to bridge what its daemon wrote down; and nothing is left of pods that go.
func TestOtherNetworks(t *testing.T) {
	for name, c := range map[string]struct {
		plugins []string
		conf    func(h *host) string
		address string
	}{
		"ptp": {[]string{"plugins/main/ptp"}, func(h *host) string {
			return `{"cniVersion":"1.0.0","name":"cables","plugins":[{"type":"ptp","mtu":1400,"ipam":` +
				h.ipam("192.0.2.0/28") + `}]}`
		}, "192.0.2.2"},
		"macvlan": {[]string{"plugins/main/macvlan", "plugins/ipam/static"}, func(h *host) string {
			return `{"cniVersion":"1.0.0","name":"uplink","plugins":[{"type":"macvlan","master":"eth0","mode":"bridge",
				"ipam":{"type":"static","addresses":[{"address":"198.51.100.7/24","gateway":"198.51.100.1"}],"routes":[{"dst":"0.0.0.0/0"}]}}]}`
		}, "198.51.100.7"},
		"flannel": {[]string{"plugins/meta/flannel@v0.9.1"}, func(h *host) string {
			env := filepath.Join(h.dir, "subnet.env")
			if err := os.WriteFile(env,
				[]byte(
					"FLANNEL_NETWORK=172.20.0.0/16\nFLANNEL_SUBNET=172.20.5.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"), 0o644); err != nil {
				h.fail("%v", err)
			}
			return fmt.Sprintf(
				`{"name":"cbr0","cniVersion":"0.3.1","plugins":[{"type":"flannel","subnetFile":%q,"dataDir":%q,
				"ipam":{"dataDir":%q},"delegate":{"hairpinMode":true,"isDefaultGateway":true}}]}`, env,
				filepath.Join(h.dir, "flannel"), filepath.Join(h.dir, "theirs"))
		}, "172.20.5.2"},
	} {
		t.Run(name, func(t *testing.T) {
			theirs := more(t, c.plugins...)
			onHost(t, func(h *host) {
				if err := cable("198.51.100.2/24"); err != nil {
					h.fail("%v", err)
				}
				h.install(theirs)
				h.configure("10-theirs.conflist", c.conf(h))
				if err := h.Ready(); err != nil {
					h.fail("%v", err)
				}
				r := h.sandbox()
				for range 2 { // asked twice, the answer is the same
					st, err := h.Add(t.Context(), r)
					if err != nil || !slices.Equal(st.IPs, []string{c.address}) {
						h.fail("%v, %v", st, err)
					}
				}
				if in := h.inside(r); !slices.Contains(in, c.address) {
					t.Errorf("inside: %v", in)
				}
				if err := h.Check(t.Context(), r); err != nil {
					t.Errorf("CHECK: %v", err)
				}
				h.Network = New(h.cfg) // the agent was restarted
				if err := h.GC(t.Context(), []string{r.SandboxID}); err != nil {
					t.Errorf("GC: %v", err)
				}
				if in := h.inside(r); !slices.Contains(in, c.address) {
					t.Errorf("after GC, inside: %v", in)
				}
				// it goes as it came, although the configuration is another one by now
				h.configure("10-theirs.conflist", "")
				if err := h.Del(t.Context(), r); err != nil {
					t.Errorf("DEL: %v", err)
				}
				left, err := filepath.Glob(filepath.Join(h.dir, "theirs", "*", "[0-9]*"))
				if err != nil || len(left) > 0 || h.ports() != 2 { // the uplink's own ends
					t.Errorf("left: %v, %d ports, %v", left, h.ports(), err)
				}
			})
		})
	}
}

// F109: a configuration takes effect with the next pod, while others keep what they have and lose it as they got it.
func TestNetworksAreSwapped(t *testing.T) {
	ptp := more(t, "plugins/main/ptp")
	onHost(t, func(h *host) {
		h.install(ptp)
		theirs := `{"cniVersion":"1.0.0","name":"cables","plugins":[{"type":"ptp","ipam":` +
			h.ipam("192.0.2.0/28") + `}]}`
		var all []agent.NetworkRequest
		for i, conf := range []string{"", theirs, ""} {
			if i > 0 {
				h.configure("10-theirs.conflist", conf)
			}
			r := h.sandbox()
			st, err := h.Add(t.Context(), r)
			if err != nil || strings.HasPrefix(st.IPs[0], "192.0.2.") != (conf != "") {
				h.fail("%d: %v, %v", i, st, err)
			}
			all = append(all, r)
		}
		for _, r := range all {
			if err := errors.Join(h.Check(t.Context(), r), h.Del(t.Context(), r)); err != nil {
				t.Error(err)
			}
		}
		h.nothingLeft("at the end")
	})
}

// F109: pods wait for a configuration that is broken, and the message names the file, the line and what is wrong.
func TestBrokenConfigurations(t *testing.T) {
	n := New(Config{ConfDir: t.TempDir(), BinDirs: []string{t.TempDir()}, RunDir: t.TempDir(),
		PodCIDRs: func() []netip.Prefix { return prefixesOf("10.244.1.0/24") }})
	for name, c := range map[string]struct{ file, text, want string }{
		"cut off": {"a.conflist", "{\n\"name\": \"x\",\n", "a.conflist, line 2: unexpected end"},
		"a comma too many": {"a.conflist", "{\n\"name\": \"x\",\n\"plugins\": [],\n}",
			"a.conflist, line 4: invalid character '}'"},
		"empty":     {"a.conflist", "", "a.conflist, line 1: unexpected end"},
		"no object": {"a.conflist", "\n[]", "a.conflist, line 2:"},
		"no name": {"a.conflist", "{\"plugins\": [{\"type\": \"ptp\"}]}",
			"a.conflist, line 1: it has no name"},
		"name of a number": {"a.conflist", "{\n\n\"name\": 3}", "a.conflist, line 3: name: want a string"},
		"no plugins":       {"a.conflist", "{\"name\": \"x\"}", "it lists no plugins"},
		"empty plugins":    {"a.conflist", "{\"name\": \"x\",\n \"plugins\": []}", "line 2: it lists no plugins"},
		"plugins no list":  {"a.conflist", "{\"name\": \"x\",\n \"plugins\": {}}", "line 2: plugins: want a list"},
		"one without type": {"a.conflist", "{\"name\": \"x\", \"plugins\": [\n{\"type\": \"ptp\"},\n{\"mtu\": 3}]}",
			"line 3: a plugin has no type"},
		"a path": {"a.conflist", "{\"name\": \"x\", \"plugins\": [\n{\"type\": \"../../bin/sh\"}]}",
			"line 2: type \"../../bin/sh\" of a plugin: want the name of a program"},
		"one of one": {"a.conf", "{\"name\": \"x\",\n\"ipam\": {}}", "a.conf, line 1: a plugin has no type"},
		"a version of ever": {"a.conflist", "{\"cniVersion\": \"9.9.9x\", \"name\": \"x\", \"plugins\": [{\"type\": " +
			"\"ptp\"}]}", "a.conflist, line 1: cniVersion \"9.9.9x\" is not supported"},
		"too long": {"a.conflist", strings.Repeat(" ", configurationLimit+1),
			"the file exceeds 1048576 bytes"},
		"not installed": {"a.conflist", "{\"cniVersion\": \"1.0.0\", \"name\": \"x\", \"plugins\": [{\"type\": " +
			"\"ptp\"}]}", "plugin ptp is not in " + n.cfg.BinDirs[0]},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(n.cfg.ConfDir, c.file)
			if err := os.WriteFile(path, []byte(c.text), 0o644); err != nil {
				t.Fatal(err)
			}
			defer os.Remove(path)
			if err := n.Ready(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if _, err := n.Add(t.Context(), agent.NetworkRequest{SandboxID: "a", Namespace: "default",
				Name: "web"}); err == nil {
				t.Error("a pod was attached")
			}
		})
	}
}

// F109: plugins of a configuration may stand in files of their own, in a folder of its name beside it.
func TestPluginsInFilesOfTheirOwn(t *testing.T) {
	dir := t.TempDir()
	beside := filepath.Join(dir, "many")
	path := filepath.Join(dir, "10-many.conflist")
	if err := errors.Join(os.Mkdir(beside, 0o755),
		os.WriteFile(path, []byte(`{"cniVersion":"1.1.0","name":"many"}`), 0o644),
		os.WriteFile(filepath.Join(beside, "a.conf"), []byte(`{"type":"ptp"}`), 0o644)); err != nil {
		t.Fatal(err)
	}
	if list, err := loadConfiguration(path); err != nil || len(list.Plugins) != 1 ||
		list.Plugins[0].Network.Type != "ptp" {
		t.Errorf("%v, %v", list, err)
	}
}

// F107: a plugin that says that it is not ready is asked again, and keeps pods waiting until it is.
func TestStatusVerb(t *testing.T) {
	onHost(t, func(h *host) {
		h.foreignPlugin(`echo $CNI_COMMAND >> $here/calls
case $CNI_COMMAND in
STATUS) [ -e $here/ready ] || { echo '{"cniVersion":"1.1.0","code":50,"msg":"the fabric is being woven"}'; exit 1; };;
VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["1.1.0"]}';;
esac
`)
		for range 3 {
			if err := h.Ready(); err == nil || !strings.Contains(err.Error(), `network "foreign" is not ready`) ||
				!strings.Contains(err.Error(), "the fabric is being woven") {
				t.Errorf("not ready: %v", err)
			}
		}
		calls, _ := os.ReadFile(filepath.Join(h.cfg.BinDirs[0], "calls"))
		if n := strings.Count(string(calls), "STATUS"); n != 1 {
			t.Errorf("asked %d times in a moment", n)
		}
		if err := os.WriteFile(filepath.Join(h.cfg.BinDirs[0], "ready"), nil, 0o644); err != nil {
			h.fail("%v", err)
		}
		h.Network = New(h.cfg)
		if err := h.Ready(); err != nil {
			t.Errorf("ready: %v", err)
		}
	})
}

// F107: limits of bandwidth are kept in both directions, and refused where no plugin would keep them.
func TestBandwidth(t *testing.T) {
	onHost(t, func(h *host) {
		r := h.sandbox()
		r.Ingress, r.Egress = 8_000_000, 16_000_000
		if _, err := h.Add(t.Context(), r); err != nil {
			h.fail("%v", err)
		}
		rate := func(nl *netlink.Handle, l netlink.Link) uint64 {
			list, err := nl.QdiscList(l)
			if err != nil {
				h.fail("%v", err)
			}
			for _, q := range list {
				if tbf, ok := q.(*netlink.Tbf); ok {
					return tbf.Rate * 8
				}
			}
			return 0
		}
		here, err := netlink.NewHandle()
		if err != nil {
			h.fail("%v", err)
		}
		defer here.Close()
		a := h.mustRemember(r)
		outside, err := here.LinkByName(h.hostVeth(a).Name)
		if err != nil {
			h.fail("%v", err)
		}
		ns, err := netns.GetFromPath(r.NetNS)
		if err != nil {
			h.fail("%v", err)
		}
		defer ns.Close()
		in, err := netlink.NewHandleAt(ns)
		if err != nil {
			h.fail("%v", err)
		}
		defer in.Close()
		inside, err := in.LinkByName(ifName)
		if err != nil {
			h.fail("%v", err)
		}
		if got, sent := rate(here, outside), rate(in, inside); got != 8_000_000 || sent != 16_000_000 {
			t.Errorf("receives %d, sends %d bit/s", got, sent)
		}
		if err := h.Del(t.Context(), r); err != nil {
			t.Error(err)
		}
		h.configure("10-theirs.conflist", `{"cniVersion":"1.0.0","name":"cables","plugins":[{"type":"ptp"}]}`)
		if _, err := h.Add(t.Context(), r); err == nil ||
			!strings.Contains(err.Error(), "no plugin of the network has the capability bandwidth") {
			t.Errorf("on a network that keeps no limits: %v", err)
		}
	})
}

func (h *host) mustRemember(r agent.NetworkRequest) cachedAttachment {
	h.Helper()
	all, err := h.cachedAttachments(r.SandboxID)
	if err != nil || len(all) != 1 {
		h.fail("remembered: %v, %v", all, err)
	}
	return all[0]
}

// F107: after a reboot, which empties the folder of addresses and takes all namespaces, addresses are assigned again and none
// twice; and pods of a cluster that has got a second family get both, while those of before keep what they have.
func TestRebootAndSecondFamily(t *testing.T) {
	onHost(t, func(h *host) {
		for range 3 {
			if _, err := h.Add(t.Context(), h.sandbox()); err != nil {
				h.fail("%v", err)
			}
		}
		bridge, err := netlink.LinkByName("keelson0")
		if err == nil {
			err = errors.Join(netlink.LinkDel(bridge), os.RemoveAll(h.cfg.RunDir))
		}
		if err != nil {
			h.fail("%v", err)
		}
		h.Network = New(h.cfg)
		if err := h.GC(t.Context(), nil); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("GC after a reboot: %v", err)
		}
		var kept []string
		seen := map[string]bool{}
		add := func(want int) {
			r := h.sandbox()
			st, err := h.Add(t.Context(), r)
			if err != nil || len(st.IPs) != want {
				h.fail("%v, %v", st, err)
			}
			for _, ip := range st.IPs {
				if seen[ip] {
					t.Errorf("%s was given twice", ip)
				}
				seen[ip] = true
			}
			kept = append(kept, r.SandboxID)
		}
		add(1)
		add(1)
		h.cfg.PodCIDRs = func() []netip.Prefix { return prefixesOf("10.244.3.0/28,fd44:0:0:3::/64") }
		h.Network = New(h.cfg)
		add(2)
		add(2)
		if err := h.GC(context.Background(), kept); err != nil {
			t.Errorf("GC: %v", err)
		}
		if got := h.addresses(); len(got) != 6 {
			t.Errorf("held: %v", got)
		}
	})
}
