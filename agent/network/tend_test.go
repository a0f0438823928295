package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/wait"
)

// foreignPlugin makes a script the node's only plugin.
func (h *host) foreignPlugin(script string) {
	h.Helper()
	text := `{"cniVersion":"1.1.0","name":"foreign","plugins":[{"type":"script"}]}`
	err := errors.Join(os.WriteFile(filepath.Join(h.cfg.BinDirs[0], "script"),
		[]byte("#!/bin/sh\nhere=$(dirname \"$0\")\n"+script), 0o755),
		os.WriteFile(filepath.Join(h.cfg.ConfDir, "10-own.conflist"), []byte(text), 0o644))
	if err != nil {
		h.fail("%v", err)
	}
}

// attached is a plugin's response to ADD.
const attached = `echo '{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"x"}],"ips":[{"address":"10.9.0.2/24","interface":0}]}'
`

// Every verb has a deadline: a plugin that hangs is killed with its process group.
func TestVerbsHaveDeadlines(t *testing.T) {
	onHost(t, func(h *host) {
		h.foreignPlugin(`
if [ $CNI_COMMAND = ADD ] && [ -e $here/first ]; then rm $here/first; ` + attached + ` exit 0; fi
sleep 1000 & echo $! >> $here/pids
exec sleep 1000
`)
		if err := os.WriteFile(filepath.Join(h.cfg.BinDirs[0], "first"), nil, 0o644); err != nil {
			h.fail("%v", err)
		}
		r := h.sandbox()
		if _, err := h.Add(context.Background(), r); err != nil {
			h.fail("the ADD that does not hang: %v", err)
		}
		children := func() []string {
			raw, err := os.ReadFile(filepath.Join(h.cfg.BinDirs[0], "pids"))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				h.fail("%v", err)
			}
			return strings.Fields(string(raw))
		}
		other := h.sandbox()
		for verb, call := range map[string]func() error{
			"ADD":   func() error { _, err := h.Add(context.Background(), other); return err },
			"CHECK": func() error { return h.Check(context.Background(), r) },
			"DEL":   func() error { return h.Del(context.Background(), r) },
			"GC":    func() error { return h.GC(context.Background(), []string{r.SandboxID}) },
		} {
			// What is killed before it has started anything leaves nothing to look for: it gets more time then.
			for before, deadline := len(children()), 300*time.Millisecond; len(children()) == before; deadline *= 2 {
				h.cfg.Deadline = deadline
				if err := call(); err == nil ||
					!strings.Contains(err.Error(), fmt.Sprintf("CNI %s took longer than %s", verb, deadline)) {
					h.fail("%s: %v", verb, err)
				}
			}
		}
		for _, f := range children() {
			pid, _ := strconv.Atoi(f)
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			if err := wait.For(ctx, time.Millisecond, func() error {
				if stat, err := os.ReadFile("/proc/" + f + "/stat"); err == nil &&
					!strings.Contains(string(stat), ") Z ") && unix.Kill(pid, 0) == nil {
					return errors.New("it lives")
				}
				return nil
			}); err != nil {
				t.Errorf("child %d of a plugin: %v", pid, err)
			}
			cancel()
		}
	})
}

// GC spares what is being attached while it runs, and what was attached after the list was made that it goes by; the
// plugins hear of what is to be kept.
func TestGarbageSparesTheNew(t *testing.T) {
	onHost(t, func(h *host) {
		began, goOn := filepath.Join(h.cfg.BinDirs[0], "began"), filepath.Join(h.cfg.BinDirs[0], "go-on")
		if err := errors.Join(unix.Mkfifo(began, 0o600), unix.Mkfifo(goOn, 0o600)); err != nil {
			h.fail("%v", err)
		}
		h.foreignPlugin(`echo $CNI_COMMAND >> $here/calls
case $CNI_COMMAND in
ADD) echo x > $here/began; read x < $here/go-on; ` + attached + `;;
GC) cat > $here/gc;;
VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["1.1.0"]}';;
esac
`)
		r := h.sandbox()
		added := make(chan error, 1)
		go func() { _, err := h.Add(context.Background(), r); added <- err }()
		if _, err := os.ReadFile(began); err != nil {
			h.fail("%v", err)
		}
		if err := h.GC(t.Context(), nil); err != nil {
			t.Errorf("GC beside an ADD: %v", err)
		}
		if err := os.WriteFile(goOn, []byte("x\n"), 0); err != nil {
			h.fail("%v", err)
		}
		if err := <-added; err != nil {
			h.fail("%v", err)
		}
		if err := h.GC(t.Context(), []string{}); err != nil {
			t.Errorf("GC by an old list: %v", err)
		}
		calls, _ := os.ReadFile(filepath.Join(h.cfg.BinDirs[0], "calls"))
		if got := strings.Join(strings.Fields(strings.ReplaceAll(string(calls), "VERSION", "")), " "); got != "ADD GC" {
			t.Errorf("the plugin was called %q", got)
		}
		var heard struct {
			Valid []struct {
				ContainerID string `json:"containerID"`
			} `json:"cni.dev/valid-attachments"`
		}
		raw, err := os.ReadFile(filepath.Join(h.cfg.BinDirs[0], "gc"))
		if err == nil {
			err = json.Unmarshal(raw, &heard)
		}
		if err != nil || len(heard.Valid) != 1 || heard.Valid[0].ContainerID != r.SandboxID {
			t.Errorf("GC heard %s, %v", raw, err)
		}
	})
}

// cable gives the namespace a link with an address.
func cable(cidr string) error {
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer"}); err != nil {
		return err
	}
	for _, name := range []string{"eth0", "peer"} {
		l, err := netlink.LinkByName(name)
		if err == nil && name == "eth0" {
			var a *netlink.Addr
			if a, err = netlink.ParseAddr(cidr); err == nil {
				err = netlink.AddrAdd(l, a)
			}
		}
		if err == nil {
			err = netlink.LinkSetUp(l)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// routesOn runs a node's routes in a network namespace of its own with a link that has an address.
func routesOn(t *testing.T, r *Routes, address string) (nl *netlink.Handle, stop func(), done <-chan error) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root for a network namespace")
	}
	r.Node, r.Log = "w1", slog.New(slog.DiscardHandler)
	r.NodeIPs = []netip.Addr{netip.MustParsePrefix(address).Addr()}
	ctx, stop := context.WithCancel(t.Context())
	ready, ended := make(chan netns.NsHandle, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		ns, err := netns.New()
		if err == nil {
			err = cable(address)
		}
		ready <- ns
		if err != nil {
			ended <- err
			return
		}
		ended <- r.Run(ctx)
	}()
	ns := <-ready
	nl, err := netlink.NewHandleAt(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(); nl.Close(); ns.Close() })
	return nl, stop, ended
}

// ourRoutes is how many routes of ours there are.
func ourRoutes(nl *netlink.Handle) (int, error) {
	got, err := nl.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Protocol: routeProtocol},
		netlink.RT_FILTER_PROTOCOL)
	return len(got), err
}

// When a network product appears our routes go; they come back when it leaves.
func TestForeignNetworkHasItsOwnRoutes(t *testing.T) {
	var foreign atomic.Bool
	objects := fake.NewCluster()
	objects.Put(node("w2", "10.244.1.0/24", "10.89.0.102"))
	nl, stop, done := routesOn(t, &Routes{Objects: objects, ForeignNetwork: foreign.Load}, "10.89.0.101/24")
	for i, has := range []int{3, 0, 3} { // to w2, and refusals for the other pods and for Services
		foreign.Store(has == 0)
		objects.Put(node("w2", "10.244.1.0/24", "10.89.0.102")) // any news of nodes: the timer is slower
		wctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if err := wait.For(wctx, time.Millisecond, func() error {
			got, err := ourRoutes(nl)
			if err == nil && got != has {
				err = errors.New("routes of ours: " + strconv.Itoa(got))
			}
			return err
		}); err != nil {
			t.Errorf("step %d: %v, want %d", i, err, has)
		}
		cancel()
	}
	stop()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// F108: a node whose own address is in a range of the cluster is refused by a sentence, and gets no route.
func TestNodeAmongPodsIsRefused(t *testing.T) {
	for address, want := range map[string]string{
		"10.88.3.7/24": "--node-ip 10.88.3.7 is in the cluster's --cluster-cidr 10.88.0.0/16",
		"10.96.0.9/24": "--node-ip 10.96.0.9 is in the cluster's --service-cidr 10.96.0.0/12",
	} {
		objects := fake.NewCluster()
		objects.Put(node("w2", "10.244.1.0/24", "10.89.0.102"))
		nl, _, done := routesOn(t, &Routes{Objects: objects, ForeignNetwork: func() bool { return false }}, address)
		select {
		case err := <-done:
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %q", address, err, want)
			}
		case <-time.After(time.Minute):
			t.Errorf("%s is not refused", address)
		}
		if got, err := ourRoutes(nl); got != 0 || err != nil {
			t.Errorf("%s: %d routes of ours, %v", address, got, err)
		}
	}
}
