package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/cni"
	"keelson.dev/keelson/internal/wait"
)

// plugins builds the real plugins bridge, host-local and portmap once for all tests. Without a Go
// toolchain, KEELSON_CNI_BIN is their directory.
var plugins = sync.OnceValues(func() (string, error) {
	if dir := os.Getenv("KEELSON_CNI_BIN"); dir != "" {
		return dir, nil
	}
	dir, err := os.MkdirTemp("", "keelson-cni-test-")
	if err != nil {
		return "", err
	}
	pluginDir = dir
	for _, p := range []string{"plugins/main/bridge", "plugins/ipam/host-local", "plugins/meta/portmap"} {
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(dir, filepath.Base(p)),
			"github.com/containernetworking/plugins/"+p)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build %s: %w\n%s", p, err, out)
		}
	}
	return dir, nil
})

var pluginDir string

func TestMain(m *testing.M) {
	code := m.Run()
	if pluginDir != "" {
		os.RemoveAll(pluginDir)
	}
	os.Exit(code)
}

// host is a node: a network namespace without an uplink, its files, and the namespaces of
// sandboxes.
type host struct {
	testing.TB
	*Network
	dir string
	seq int
}

// onHost runs f on a thread in a new network namespace, from which plugins are executed.
func onHost(t testing.TB, f func(h *host)) {
	if os.Geteuid() != 0 {
		t.Skip("needs root for network namespaces")
	}
	bin, err := plugins()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	own := filepath.Join(dir, "bin")
	if err := errors.Join(os.Mkdir(own, 0o755), os.Mkdir(filepath.Join(dir, "conf"), 0o755),
		os.Mkdir(filepath.Join(dir, "ns"), 0o755)); err != nil {
		t.Fatal(err)
	}
	c := Config{ConfDir: filepath.Join(dir, "conf"), BinDirs: []string{own, bin}, RunDir: filepath.Join(dir, "run"),
		PodCIDRs: func() []netip.Prefix {
			return []netip.Prefix{netip.MustParsePrefix("10.244.3.0/28")}
		}, Log: slog.New(slog.DiscardHandler)}
	h := &host{TB: t, Network: New(c), dir: dir}
	t.Cleanup(func() {
		mounts, _ := filepath.Glob(filepath.Join(dir, "ns", "*"))
		for _, m := range mounts {
			_ = unix.Unmount(m, unix.MNT_DETACH)
		}
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		ns, err := netns.New()
		if err != nil {
			t.Errorf("namespace: %v", err)
			return
		}
		defer ns.Close()
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			t.Errorf("loopback: %v", err)
			return
		}
		f(h)
	}()
	<-done
}

// fail ends the test from the host's thread.
func (h *host) fail(format string, args ...any) {
	h.Helper()
	h.Errorf(format, args...)
	runtime.Goexit()
}

// sandbox creates a network namespace that is pinned like that of a sandbox.
func (h *host) sandbox() agent.NetworkRequest {
	h.Helper()
	h.seq++
	id := fmt.Sprintf("sandbox%d", h.seq)
	path := filepath.Join(h.dir, "ns", id)
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		h.fail("%v", err)
	}
	made := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND, "")
		}
		made <- err
	}()
	if err := <-made; err != nil {
		h.fail("namespace of %s: %v", id, err)
	}
	return agent.NetworkRequest{SandboxID: id, NetNS: path, Namespace: "default", Name: "web-" + id, UID: "u1"}
}

// unpin removes the pin of a sandbox's namespace.
func (h *host) unpin(r agent.NetworkRequest) {
	h.Helper()
	if err := errors.Join(unix.Unmount(r.NetNS, unix.MNT_DETACH), os.Remove(r.NetNS)); err != nil {
		h.fail("%v", err)
	}
}

// addresses returns the addresses that host-local holds, sorted.
func (h *host) addresses() []string {
	h.Helper()
	files, err := os.ReadDir(filepath.Join(h.dir, "run", "ipam", "keelson"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		h.fail("%v", err)
	}
	var out []string
	for _, f := range files {
		if _, err := netip.ParseAddr(f.Name()); err == nil {
			out = append(out, f.Name())
		}
	}
	return out
}

// ports returns the number of ports on the bridge.
func (h *host) ports() int {
	h.Helper()
	links, err := netlink.LinkList()
	if err != nil {
		h.fail("%v", err)
	}
	n := 0
	for _, l := range links {
		if l.Type() == "veth" {
			n++
		}
	}
	return n
}

// inside returns the addresses of eth0 in a sandbox.
func (h *host) inside(r agent.NetworkRequest) []string {
	h.Helper()
	ns, err := netns.GetFromPath(r.NetNS)
	if err != nil {
		h.fail("%v", err)
	}
	defer ns.Close()
	nl, err := netlink.NewHandleAt(ns)
	if err != nil {
		h.fail("%v", err)
	}
	defer nl.Close()
	l, err := nl.LinkByName("eth0")
	if err != nil {
		return nil
	}
	list, err := nl.AddrList(l, netlink.FAMILY_V4)
	if err != nil {
		h.fail("%v", err)
	}
	var out []string
	for _, a := range list {
		out = append(out, a.IP.String())
	}
	return out
}

// nothingLeft checks that no address and no port is held.
func (h *host) nothingLeft(when string) {
	h.Helper()
	// The kernel removes an unpinned namespace, and its end of a port, asynchronously.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := wait.For(ctx, 5*time.Millisecond, func() error {
		cached, _ := filepath.Glob(filepath.Join(h.dir, "run", "cache", "results", "*"))
		if a, p := h.addresses(), h.ports(); len(a) > 0 || p > 0 || len(cached) > 0 {
			return fmt.Errorf("addresses %v, %d ports and records %v are left", a, p, cached)
		}
		return nil
	})
	if err != nil {
		h.Errorf("%s: %v", when, err)
	}
}

// Every verb succeeds when it is repeated, and nothing is held afterwards. F107, P10
func TestVerbsAreIdempotent(t *testing.T) {
	onHost(t, func(h *host) {
		r := h.sandbox()
		first, err := h.Add(t.Context(), r)
		if err != nil {
			h.fail("%v", err)
		}
		if len(first.IPs) != 1 || !slices.Equal(h.inside(r), first.IPs) || first.MAC == "" ||
			!slices.Equal(first.Gateways, []string{"10.244.3.1"}) {
			t.Errorf("attached as %+v; eth0 has %v", first, h.inside(r))
		}
		again, err := h.Add(t.Context(), r)
		if err != nil || !slices.Equal(again.IPs, first.IPs) || again.MAC != first.MAC {
			t.Errorf("attached again: %+v, %v; want %+v", again, err, first)
		}
		if a := h.addresses(); !slices.Equal(a, first.IPs) {
			t.Errorf("held: %v", a)
		}
		for range 2 {
			if err := h.Check(t.Context(), r); err != nil {
				t.Errorf("check: %v", err)
			}
		}
		other := h.sandbox()
		if st, err := h.Add(t.Context(), other); err != nil || slices.Equal(st.IPs, first.IPs) {
			t.Errorf("a second sandbox: %+v, %v", st, err)
		}
		for range 2 {
			if err := h.Del(t.Context(), r); err != nil {
				t.Errorf("del: %v", err)
			}
		}
		if err := h.Check(t.Context(), r); err == nil {
			t.Error("check finds a detached sandbox attached")
		}
		if err := h.Check(t.Context(), other); err != nil {
			t.Errorf("the other sandbox suffered: %v", err)
		}
		held, err := netns.GetFromPath(other.NetNS) // as another mount may hold it for a while
		if err != nil {
			h.fail("%v", err)
		}
		defer held.Close()
		h.unpin(other) // the namespace was removed before its network was released
		for range 2 {
			if err := h.Del(t.Context(), other); err != nil {
				t.Errorf("del without a namespace: %v", err)
			}
		}
		h.nothingLeft("after DEL")
		if err := h.Del(t.Context(), h.sandbox()); err != nil {
			t.Errorf("del without add: %v", err)
		}
	})
}

// Addresses and ports that belong to no sandbox are released: according to the records, and, if a
// record is lost, according to the held address and the port. Neither waits for another holder of
// the sandbox's namespace. F107, P10
func TestGarbage(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprint("records lost=", lost), func(t *testing.T) {
			onHost(t, func(h *host) {
				keep, gone := h.sandbox(), h.sandbox()
				held, err := netns.GetFromPath(gone.NetNS) // as another mount may hold it for a while
				if err != nil {
					h.fail("%v", err)
				}
				defer held.Close()
				st, err := h.Add(t.Context(), keep)
				if err == nil {
					_, err = h.Add(t.Context(), gone)
				}
				if err != nil {
					h.fail("%v", err)
				}
				if lost {
					files, err := filepath.Glob(filepath.Join(h.dir, "run", "cache", "results", "*"+gone.SandboxID+"*"))
					if err != nil || len(files) != 1 {
						h.fail("records: %v, %v", files, err)
					}
					if err := os.Remove(files[0]); err != nil {
						h.fail("%v", err)
					}
				}
				h.unpin(gone)
				h.Network = New(h.cfg) // the agent was restarted
				for range 2 {
					if err := h.GC(t.Context(), []string{keep.SandboxID}); err != nil {
						t.Errorf("GC: %v", err)
					}
				}
				if a := h.addresses(); !slices.Equal(a, st.IPs) {
					t.Errorf("held: %v, want %v", a, st.IPs)
				}
				if n := h.ports(); n != 1 {
					t.Errorf("%d ports for one sandbox", n)
				}
				if err := h.Check(t.Context(), keep); err != nil {
					t.Errorf("what is kept suffered: %v", err)
				}
				if err := h.GC(t.Context(), nil); err != nil {
					t.Errorf("GC of all: %v", err)
				}
				h.nothingLeft("after GC")
			})
		})
	}
}

// While a kept sandbox has lost its record, the owner of an unrecorded port is unknown, and no port
// is removed. Ports that another program attached to the bridge are never removed. P10
func TestPortsThatAreNoGarbage(t *testing.T) {
	onHost(t, func(h *host) {
		keep := h.sandbox()
		if _, err := h.Add(t.Context(), keep); err != nil {
			h.fail("%v", err)
		}
		bridge, err := netlink.LinkByName(cni.Bridge)
		if err != nil {
			h.fail("%v", err)
		}
		for _, name := range []string{"tap-of-mine", "vethernet"} {
			theirs := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, MasterIndex: bridge.Attrs().Index},
				PeerName: name + "-x"}
			if err := netlink.LinkAdd(theirs); err != nil {
				h.fail("%v", err)
			}
		}
		if err := os.RemoveAll(filepath.Join(h.dir, "run", "cache")); err != nil {
			h.fail("%v", err)
		}
		h.Network = New(h.cfg) // the agent was restarted
		if err := h.GC(t.Context(), []string{keep.SandboxID}); err != nil {
			t.Errorf("GC: %v", err)
		}
		if a := h.inside(keep); len(a) != 1 {
			t.Errorf("the sandbox whose record is lost has addresses %v", a)
		}
		if n := h.ports(); n != 5 {
			t.Errorf("%d ends of ports, want that of the sandbox and four that are not ours", n)
		}
		if err := h.GC(t.Context(), nil); err != nil {
			t.Errorf("GC of all: %v", err)
		}
		if n := h.ports(); n != 4 {
			t.Errorf("%d ends of ports, want the four that are not ours", n)
		}
	})
}

// An agent that crashed during an ADD has no record of it: DEL releases the held address and port
// nevertheless. P10
func TestDelWithoutRecord(t *testing.T) {
	onHost(t, func(h *host) {
		r := h.sandbox()
		if _, err := h.Add(t.Context(), r); err != nil {
			h.fail("%v", err)
		}
		if err := os.RemoveAll(filepath.Join(h.dir, "run", "cache")); err != nil {
			h.fail("%v", err)
		}
		for range 2 {
			if err := h.Del(t.Context(), r); err != nil {
				t.Errorf("del: %v", err)
			}
		}
		h.nothingLeft("after DEL")
		if _, err := h.Add(t.Context(), r); err != nil {
			t.Errorf("add after that: %v", err)
		}
	})
}

// The network is full after as many sandboxes as it has addresses, returns an error then, and is
// usable again when a sandbox is removed.
func TestAddressesRunOut(t *testing.T) {
	onHost(t, func(h *host) {
		var all []agent.NetworkRequest
		for range 13 { // 16 without the network, gateway and broadcast addresses
			r := h.sandbox()
			if _, err := h.Add(t.Context(), r); err != nil {
				h.fail("after %d: %v", len(all), err)
			}
			all = append(all, r)
		}
		late := h.sandbox()
		if _, err := h.Add(t.Context(), late); err == nil ||
			!strings.Contains(err.Error(), "no IP addresses available") ||
			!strings.Contains(err.Error(), "default/web-"+late.SandboxID) {
			t.Errorf("one too many: %v", err)
		}
		if len(h.addresses()) != len(all) || h.ports() != len(all) {
			t.Errorf("the refused one holds something: %v, %d ports", h.addresses(), h.ports())
		}
		if err := h.Del(t.Context(), all[4]); err != nil {
			h.fail("%v", err)
		}
		if _, err := h.Add(t.Context(), late); err != nil {
			t.Errorf("with one address free again: %v", err)
		}
		for _, r := range append(all, late) {
			if err := h.Del(t.Context(), r); err != nil {
				t.Error(err)
			}
		}
		h.nothingLeft("at the end")
	})
}

// broken is a plugin that fails every ADD and logs its calls.
const broken = `#!/bin/sh
echo "$CNI_COMMAND" >> "$(dirname "$0")/calls"
case "$CNI_COMMAND" in
ADD) echo '{"cniVersion":"1.1.0","code":107,"msg":"the fuse is blown","details":"replace it"}'; exit 1;;
esac
`

// The error of a plugin that fails names the pod and the cause. The effects of earlier plugins are
// undone. F107, P10
func TestPluginFails(t *testing.T) {
	onHost(t, func(h *host) {
		bin := h.cfg.BinDirs[0]
		if err := os.WriteFile(filepath.Join(bin, "fuse"), []byte(broken), 0o755); err != nil {
			h.fail("%v", err)
		}
		list, err := h.activeConfiguration(false)
		if err != nil {
			h.fail("%v", err)
		}
		text := string(list.Bytes)
		end := strings.LastIndex(text, "]")
		text = text[:end] + `,{"type":"fuse"}` + text[end:] // after bridge and host-local have run
		if err := os.WriteFile(filepath.Join(h.cfg.ConfDir, "10-own.conflist"), []byte(text), 0o644); err != nil {
			h.fail("%v", err)
		}
		r := h.sandbox()
		for range 2 { // the retry fails in the same way and holds nothing either
			_, err = h.Add(t.Context(), r)
			if err == nil {
				h.fail("attached by a broken plugin")
			}
			for _, want := range []string{`plugin type="fuse" failed (add)`, "the fuse is blown", "replace it",
				"default/web-" + r.SandboxID} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			h.nothingLeft("after a failed ADD")
		}
		calls, _ := os.ReadFile(filepath.Join(bin, "calls"))
		if string(calls) != "ADD\nDEL\nADD\nDEL\n" {
			t.Errorf("the plugin was called %q", calls)
		}
		if err := os.WriteFile(filepath.Join(bin, "fuse"), []byte("#!/bin/sh\ncat >/dev/null\nexit 3\n"), 0o755); err !=
			nil {
			h.fail("%v", err)
		}
		if _, err := h.Add(t.Context(), r); err == nil || !strings.Contains(err.Error(), `type="fuse"`) {
			t.Errorf("a plugin that ends without a word: %v", err)
		}
		if err := os.Remove(filepath.Join(bin, "fuse")); err != nil {
			h.fail("%v", err)
		}
		if _, err := h.Add(t.Context(), r); err == nil || !strings.Contains(err.Error(), "fuse") {
			t.Errorf("a plugin that is not there: %v", err)
		}
	})
}

// A plugin that hangs is stopped with the request, and its effects are undone.
func TestPluginHangs(t *testing.T) {
	onHost(t, func(h *host) {
		bin := h.cfg.BinDirs[0]
		fifo := filepath.Join(bin, "began")
		if err := unix.Mkfifo(fifo, 0o600); err != nil {
			h.fail("%v", err)
		}
		script := "#!/bin/sh\n[ $CNI_COMMAND = ADD ] || exit 0\necho x > " + fifo + "\nexec sleep 1000\n"
		if err := os.WriteFile(filepath.Join(bin, "hang"), []byte(script), 0o755); err != nil {
			h.fail("%v", err)
		}
		text := `{"cniVersion":"1.1.0","name":"foreign","plugins":[{"type":"hang"}]}`
		if err := os.WriteFile(filepath.Join(h.cfg.ConfDir, "10-own.conflist"), []byte(text), 0o644); err != nil {
			h.fail("%v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			_, _ = os.ReadFile(fifo)
			cancel()
		}()
		if _, err := h.Add(ctx, h.sandbox()); err == nil {
			t.Error("attached by a plugin that hangs")
		}
		h.nothingLeft("after it was given up")
	})
}

// BenchmarkAdd attaches and releases a sandbox with the real plugins.
func BenchmarkAdd(b *testing.B) {
	onHost(b, func(h *host) {
		var before, after unix.Rusage
		spent := int64(0)
		for b.Loop() {
			b.StopTimer()
			r := h.sandbox()
			_ = unix.Getrusage(unix.RUSAGE_CHILDREN, &before)
			b.StartTimer()
			if _, err := h.Add(b.Context(), r); err != nil {
				h.fail("%v", err)
			}
			b.StopTimer()
			_ = unix.Getrusage(unix.RUSAGE_CHILDREN, &after)
			spent += after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
			if err := h.Del(b.Context(), r); err != nil {
				h.fail("%v", err)
			}
			h.unpin(r)
			b.StartTimer()
		}
		b.ReportMetric(float64(spent)/float64(b.N)/1e6, "cpu-ms/op")
	})
}
