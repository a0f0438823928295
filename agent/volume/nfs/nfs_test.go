package nfs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent/volume/remote"
)

func TestOptions(t *testing.T) {
	for _, tt := range []struct {
		given   []string
		flags   uintptr
		version string
		rest    string
	}{
		{nil, 0, "", ""},
		{[]string{"hard", "timeo=600,retrans=2"}, 0, "", "hard,timeo=600,retrans=2"},
		{[]string{"ro", "noatime", "nosuid"}, unix.MS_RDONLY | unix.MS_NOATIME | unix.MS_NOSUID, "", ""},
		{[]string{"ro,rw"}, 0, "", ""},
		{[]string{"nfsvers=4.1"}, 0, "4.1", ""},
		{[]string{"v3", "nolock"}, 0, "3", "nolock"},
		{[]string{"vers=4", "minorversion=2"}, 0, "4.2", ""},
		{[]string{"defaults,_netdev,bg,retry=3,x-systemd.automount", "soft"}, 0, "", "soft"},
	} {
		o, err := ParseOptions(tt.given)
		if err != nil || o.Flags != tt.flags || o.Version != tt.version || strings.Join(o.Rest, ",") != tt.rest {
			t.Errorf("%q: %+v, %v", tt.given, o, err)
		}
	}
	for given, want := range map[string]string{"vers=2": `version "2"`, "nfsvers=4.3": `version "4.3"`,
		"addr=192.0.2.1": "leave it out"} {
		if _, err := ParseOptions([]string{given}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", given, err)
		}
	}
}

// fakeNode is a node with a simulated kernel, whose results are set by version and address.
type fakeNode struct {
	Node
	asked   []string
	answers map[string]error
}

func newFakeNode(t *testing.T, kernel string) *fakeNode {
	b := &fakeNode{answers: map[string]error{}}
	list := filepath.Join(t.TempDir(), "filesystems")
	if err := os.WriteFile(list, []byte(kernel), 0o600); err != nil {
		t.Fatal(err)
	}
	b.filesystem = list
	b.resolve = func(_ context.Context, host string) ([]netip.Addr, error) {
		if host != "files" {
			return nil, errors.New("no such host")
		}
		return []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}, nil
	}
	b.mount = func(_ context.Context, m remote.Mount) error {
		b.asked = append(b.asked, fmt.Sprintf("%s %s %s", m.Type, m.Source, m.Data))
		for part, err := range b.answers {
			if strings.Contains(m.Data, part) {
				return err
			}
		}
		return nil
	}
	b.lookPath = func(string) (string, error) { return "", errors.New("not found") }
	return b
}

func TestWhatTheKernelIsAsked(t *testing.T) {
	for _, tt := range []struct {
		name    string
		vol     Volume
		answers map[string]error
		want    []string
		fails   string
	}{
		{"the newest version", Volume{Server: "files", Path: "/a"}, nil,
			[]string{"nfs4 files:/a vers=4.2,addr=192.0.2.1"}, ""},
		{"an address", Volume{Server: "2001:db8::2", Path: "/a"}, nil,
			[]string{"nfs4 [2001:db8::2]:/a vers=4.2,addr=2001:db8::2"}, ""},
		{"an older server", Volume{Server: "files", Path: "/a"}, map[string]error{"vers=4.2": unix.EPROTONOSUPPORT},
			[]string{"nfs4 files:/a vers=4.2,addr=192.0.2.1", "nfs4 files:/a vers=4.1,addr=192.0.2.1"}, ""},
		{"version 3 without locks", Volume{Server: "files", Path: "/a", Options: []string{"vers=3,nolock"}}, nil,
			[]string{"nfs files:/a nolock,vers=3,addr=192.0.2.1"}, ""},
		{"version 3 with locks", Volume{Server: "files", Path: "/a", Options: []string{"vers=3"}}, nil, nil,
			"install nfs-common"},
		{"no version 4", Volume{Server: "files", Path: "/a"}, map[string]error{"vers=4": unix.EPROTONOSUPPORT},
			[]string{"nfs4 files:/a vers=4.2,addr=192.0.2.1", "nfs4 files:/a vers=4.1,addr=192.0.2.1",
				"nfs4 files:/a vers=4.0,addr=192.0.2.1"}, "install nfs-common"},
		{"the other address", Volume{Server: "files", Path: "/a", Options: []string{"vers=4.1"}},
			map[string]error{"192.0.2.1": unix.EHOSTUNREACH},
			[]string{"nfs4 files:/a vers=4.1,addr=192.0.2.1", "nfs4 files:/a vers=4.1,addr=2001:db8::1"}, ""},
		{"of one family", Volume{Server: "files", Path: "/a", Options: []string{"proto=tcp6"}}, nil,
			[]string{"nfs4 files:/a proto=tcp6,vers=4.2,addr=2001:db8::1"}, ""},
		{"no name", Volume{Server: "nowhere", Path: "/a"}, nil, nil, "cannot resolve"},
		{"not exported", Volume{Server: "files", Path: "/b", Options: []string{"vers=4.2"}},
			map[string]error{"vers": unix.ENOENT},
			[]string{"nfs4 files:/b vers=4.2,addr=192.0.2.1"}, "server files exports no /b"},
		{"not exported by version 3", Volume{Server: "files", Path: "/b", Options: []string{"nolock"}},
			map[string]error{"vers=4": unix.EPROTONOSUPPORT, "vers=3": unix.ENOENT},
			[]string{"nfs4 files:/b nolock,vers=4.2,addr=192.0.2.1", "nfs4 files:/b nolock,vers=4.1,addr=192.0.2.1",
				"nfs4 files:/b nolock,vers=4.0,addr=192.0.2.1",
				"nfs files:/b nolock,vers=3,addr=192.0.2.1"}, "server files exports no /b"},
		{"not allowed", Volume{Server: "files", Path: "/b", Options: []string{"vers=4.2"}},
			map[string]error{"vers": unix.EACCES},
			[]string{"nfs4 files:/b vers=4.2,addr=192.0.2.1"}, "does not let this node mount /b"},
		{"nobody listens", Volume{Server: "192.0.2.3", Path: "/b"}, map[string]error{"vers": unix.ECONNREFUSED},
			[]string{"nfs4 192.0.2.3:/b vers=4.2,addr=192.0.2.3"}, "runs no NFS service"},
		{"hangs", Volume{Server: "192.0.2.3", Path: "/b"}, map[string]error{"vers": context.DeadlineExceeded},
			[]string{"nfs4 192.0.2.3:/b vers=4.2,addr=192.0.2.3"}, "server 192.0.2.3 did not answer within 30s"},
	} {
		b := newFakeNode(t, "nodev\tnfs\nnodev\tnfs4\n")
		b.answers = tt.answers
		err := b.Mount(t.Context(), tt.vol, "/target")
		if !slices.Equal(b.asked, tt.want) {
			t.Errorf("%s: the kernel was asked %q, want %q", tt.name, b.asked, tt.want)
		}
		if tt.fails == "" && err != nil || tt.fails != "" && (err == nil || !strings.Contains(err.Error(), tt.fails)) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

// A kernel without NFS client is reported with the remedy. A client that appears after modprobe is
// used.
func TestKernelWithoutNFS(t *testing.T) {
	b := newFakeNode(t, "nodev\ttmpfs\n\text4\n")
	vol := Volume{Server: "files", Path: "/a"}
	err := b.Mount(t.Context(), vol, "/target")
	if err == nil || !strings.Contains(err.Error(),
		"NFS files:/a: the kernel of this node has no NFS client: load module nfs") || len(b.asked) > 0 {
		t.Errorf("%v, %q", err, b.asked)
	}
	b.lookPath = func(string) (string, error) { return "/sbin/modprobe", nil }
	b.run = func(_ context.Context, _, program string, args ...string) error {
		return os.WriteFile(b.filesystem, []byte("nodev\tnfs4\n"), 0o600)
	}
	if err := b.Mount(t.Context(), vol, "/target"); err != nil || len(b.asked) != 1 {
		t.Errorf("after modprobe: %v, %q", err, b.asked)
	}
}
