package netns

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// P9: a namespace file without a mount is removed, so that its sandbox can be; a mounted namespace
// stays.
func TestUnpinnedNamespaceIsRemoved(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("namespaces need root")
	}
	path := filepath.Join(t.TempDir(), "ns")
	if err := RemoveUnpinned(path); err != nil {
		t.Errorf("nothing: %v", err)
	}
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := RemoveUnpinned(path); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the file that pins nothing is there: %v", err)
	}
	if err := CreatePinned(path); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := RemovePinned(path); err != nil {
			t.Error(err)
		}
	}()
	if err := RemoveUnpinned(path); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the namespace that is pinned: %v", err)
	}
}

// A pod's interface ignores ICMP redirects in both families, whatever the node's own settings are.
func TestPodsIgnoreRedirects(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("namespaces need root")
	}
	path := filepath.Join(t.TempDir(), "ns")
	if err := CreatePinned(path); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := RemovePinned(path); err != nil {
			t.Error(err)
		}
	}()
	read := map[string]string{}
	err := RunInThread(func() error {
		ns, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(ns)
		if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
			return err
		}
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer"}); err !=
			nil {
			return err
		}
		for _, name := range []string{"ipv4/conf/all", "ipv4/conf/eth0", "ipv6/conf/eth0"} {
			raw, e := os.ReadFile("/proc/sys/net/" + name + "/accept_redirects")
			read[name] = strings.TrimSpace(string(raw))
			err = errors.Join(err, e)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range read {
		if value != "0" {
			t.Errorf("accept_redirects of %s is %q", name, value)
		}
	}
}
