package volume

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent/volume/nfs/nfstest"
	"keelson.dev/keelson/internal/wait"
)

// files is a server that the kernel of this machine is, and a node that mounts its folders.
type files struct {
	client
	server *nfstest.Server
	dir    string // what is served
}

func serveFiles(t *testing.T) *files {
	nfstest.Need(t)
	f := newFiles(t)
	f.server = nfstest.Serve(t, f.dir, "127.0.0.1:2049")
	f.volumes.cfg.NFS.Patience = time.Minute // the clock of a slow machine in software runs ahead of what it does
	return f
}

// newFiles is what is to be served, of which a file stays whatever the node does with it, and the node.
func newFiles(t *testing.T) *files {
	f := &files{client: client{T: t}, dir: filepath.Join(t.TempDir(), "served")}
	must(t, os.MkdirAll(filepath.Join(f.dir, "data"), 0o777))
	must(t, os.WriteFile(filepath.Join(f.dir, "data", "kept"), []byte("kept"), 0o666))
	t.Cleanup(func() {
		if b, err := os.ReadFile(filepath.Join(f.dir, "data", "kept")); err != nil || string(b) != "kept" {
			t.Errorf("the server lost a file: %q, %v", b, err)
		}
	})
	f.volumes, f.cluster, _ = newVolumes(t)
	return f
}

func folder(path string, readonly bool) v1.Volume {
	return volume("files", v1.VolumeSource{NFS: &v1.NFSVolumeSource{Server: "127.0.0.1", Path: path, ReadOnly: readonly}})
}

// claim makes a PersistentVolume of a folder, and a claim of its name that is bound to it.
func (f *files) claim(name, path string, options ...string) {
	uid := types.UID(name)
	f.cluster.Put(
		&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: uid},
			Spec: v1.PersistentVolumeClaimSpec{VolumeName: name}, Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound}},
		&v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PersistentVolumeSpec{
			MountOptions: options, ClaimRef: &v1.ObjectReference{Namespace: "default", Name: name, UID: uid},
			PersistentVolumeSource: v1.PersistentVolumeSource{NFS: &v1.NFSVolumeSource{Server: "127.0.0.1", Path: path}}}})
}

func byClaim(name string) v1.Volume {
	return volume("files", v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: name}})
}

// mountedWith looks for options of what is mounted at a place.
func (f *files) mountedWith(place string, options ...string) {
	f.Helper()
	is, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(place))
	must(f.T, err)
	for _, option := range options {
		if len(is) != 1 || !strings.HasPrefix(is[0].FSType, "nfs") || !strings.Contains(","+is[0].Options+","+is[0].VFSOptions+",", ","+option+",") {
			f.Errorf("%s is not mounted with %s: %+v", place, option, is)
		}
	}
}

// mount mounts the volume of a pod and returns where.
func (f *files) mount(p *v1.Pod) string {
	f.Helper()
	m, err := f.volumes.MountAll(f.Context(), p)
	must(f.T, err)
	return m["files"].HostPath
}

// cut has no packet come to the server or from it, until it is mended.
func (f *files) cut() (mend func()) {
	f.Helper()
	const table = "table inet cut {\nchain input {\ntype filter hook input priority 0; tcp dport 2049 drop; tcp sport 2049 drop\n}\n}"
	nft := func(text string) {
		f.Helper()
		if out, err := exec.Command("nft", text).CombinedOutput(); err != nil {
			f.Fatalf("nft: %v: %s", err, out)
		}
	}
	nft(table)
	return func() { nft("delete table inet cut") }
}

// A pod has a folder of a server as its own volume or by a claim: written by one, read by another, with the options that
// the volume names. F110
func TestFoldersOfAServer(t *testing.T) {
	f := serveFiles(t)
	one, two := pod("u1", folder("/data", false)), pod("u2", folder("/data", true))
	at, ro := f.mount(one), f.mount(two)
	must(t, os.WriteFile(filepath.Join(at, "new"), []byte("of one"), 0o600))
	if got := read(t, filepath.Join(ro, "new")); got != "of one" {
		t.Errorf("the other pod reads %q", got)
	}
	if got := read(t, filepath.Join(f.dir, "data", "new")); got != "of one" {
		t.Errorf("the server has %q", got)
	}
	if err := os.WriteFile(filepath.Join(ro, "more"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("a read-only volume was written to: %v", err)
	}
	f.claim("pv", "/data", "nfsvers=4.1", "noatime,soft")
	three := pod("u3", byClaim("pv"))
	claimed := f.mount(three)
	if got := read(t, filepath.Join(claimed, "new")); got != "of one" {
		t.Errorf("by a claim a pod reads %q", got)
	}
	for place, want := range map[string][]string{at: {"vers=4.2", "hard"}, claimed: {"vers=4.1", "noatime", "soft"}} {
		f.mountedWith(place, want...)
	}
	// Whoever is taken away takes nothing from the others.
	f.gone("u1")
	if got := read(t, filepath.Join(ro, "new")); got != "of one" {
		t.Errorf("the other pod reads %q", got)
	}
	f.gone("u2")
	f.gone("u3")
	f.gone("u3")
}

// What is not there, or not for this node, is told of by name, and tried again when the server has it.
func TestServersThatRefuse(t *testing.T) {
	f := serveFiles(t)
	p := pod("u1", folder("/absent/deep", false))
	f.fails(p, "NFS 127.0.0.1:/absent/deep: server 127.0.0.1 exports no /absent/deep; with version 4 the path begins at its root of exports")
	must(t, os.MkdirAll(filepath.Join(f.dir, "absent/deep"), 0o755))
	f.mount(p)
	f.gone("u1")

	p = pod("u2", folder("/data", false))
	f.server.Let(false)
	f.fails(p, "server 127.0.0.1 does not let this node mount /data: see its exports")
	f.server.Let(true)
	f.mount(p)
	f.gone("u2")

	f.server.LetWrite(false)
	if err := os.WriteFile(filepath.Join(f.mount(p), "new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("what the server has for reading was written to: %v", err)
	}
	f.gone("u2")
	f.server.Stop()
	f.fails(p, "server 127.0.0.1 runs no NFS service; it is tried again")
	f.server.Start()
	f.mount(p)
	f.gone("u2")
}

// A server that has version 3 alone: its locks are those of nfs-utils, or none.
func TestServersOfVersionThree(t *testing.T) {
	nfstest.Need(t)
	f := newFiles(t)
	nfstest.ServeThird(t, f.dir)
	f.volumes.cfg.NFS.Patience = 2 * time.Minute

	at := f.mount(pod("u1", folder(f.dir+"/data", false)))
	must(t, os.WriteFile(filepath.Join(at, "new"), []byte("of one"), 0o600))
	f.claim("pv", f.dir+"/data", "vers=3", "nolock")
	claimed := f.mount(pod("u2", byClaim("pv")))
	if got := read(t, filepath.Join(claimed, "new")); got != "of one" {
		t.Errorf("without locks a pod reads %q", got)
	}
	for place, want := range map[string][]string{at: {"vers=3"}, claimed: {"vers=3", "nolock"}} {
		f.mountedWith(place, want...)
	}
	for _, place := range []string{at, claimed} { // by the server, and within the node
		file, err := os.OpenFile(filepath.Join(place, "new"), os.O_RDWR, 0)
		must(t, err)
		if err := unix.FcntlFlock(file.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
			t.Errorf("a lock at %s: %v", place, err)
		}
		must(t, file.Close())
	}
	f.gone("u1")
	f.gone("u2")
	f.fails(pod("u3", folder(f.dir+"/absent", false)), "reason given by server: No such file or directory")
	f.claim("none", f.dir+"/absent", "vers=3", "nolock")
	f.fails(pod("u4", byClaim("none")), "server 127.0.0.1 exports no "+f.dir+"/absent")
}

// writer is set in a process that has a file open, as a program in a pod does, and writes to it when it is told to.
const writer = "KEELSON_TEST_WRITES"

// writes is such a process, and reports whether this is one.
func writes() bool {
	path := os.Getenv(writer)
	if path == "" {
		return false
	}
	f, err := os.Create(path)
	in := bufio.NewReader(os.Stdin)
	for _, step := range []func() error{
		func() error { return err },
		func() error { _, err := f.Write(make([]byte, 1<<20)); return err }, // into the kernel's memory
		func() error { return f.Sync() },                                    // to the server
	} {
		if err := step(); err != nil {
			fmt.Println(err)
			return true
		}
		fmt.Println("done")
		_, _ = in.ReadString('\n')
	}
	return true
}

// program is a process that writes to a file.
type program struct {
	f   *files
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func (f *files) program(path string) *program {
	f.Helper()
	p := &program{f: f, cmd: exec.Command("/proc/self/exe")}
	p.cmd.Env = append(os.Environ(), writer+"="+path)
	in, err := p.cmd.StdinPipe()
	must(f.T, err)
	out, err := p.cmd.StdoutPipe()
	must(f.T, err)
	p.in, p.out = in, bufio.NewReader(out)
	must(f.T, p.cmd.Start())
	p.done()
	return p
}

func (p *program) next() {
	p.f.Helper()
	_, err := io.WriteString(p.in, "\n")
	must(p.f.T, err)
}

func (p *program) done() {
	p.f.Helper()
	if line, err := p.out.ReadString('\n'); line != "done\n" {
		p.f.Fatalf("the program says %q (%v)", line, err)
	}
}

// kill ends the process, for which the kernel waits for a server that does not answer, when the pod gives up waiting.
func (p *program) kill(uid types.UID) {
	p.f.Helper()
	must(p.f.T, p.cmd.Process.Kill())
	ended := make(chan error, 1)
	go func() { ended <- p.cmd.Wait() }()
	if err := wait.For(p.f.Context(), 100*time.Millisecond, func() error {
		select {
		case <-ended:
			return nil
		default:
		}
		return errors.Join(errors.New("a program that was killed waits for its server"), p.f.volumes.AbortIO(p.f.Context(), uid))
	}); err != nil {
		p.f.Fatal(err)
	}
}

// A server that hangs, or is gone, holds nobody for longer than a deadline: not who mounts, not an agent that finds what
// is mounted, and not who unmounts, also where the kernel has yet to write something. Nothing is removed of what it has.
func TestServersThatHang(t *testing.T) {
	f := serveFiles(t)
	one, two := pod("u1", folder("/data", false)), pod("u2", folder("/data", false))
	at := f.mount(one)
	f.mount(two)
	p := f.program(filepath.Join(at, "new"))
	mend := f.cut()
	p.next()
	p.done() // the kernel has it, and the server not
	p.next() // and now it waits for the server

	f.volumes.cfg.NFS.Patience = 4 * time.Second
	next := New(f.volumes.cfg)
	if m, err := next.MountAll(t.Context(), one); err != nil || m["files"].HostPath != at {
		t.Errorf("the next agent finds %v, %v", m, err)
	}
	f.fails(pod("u3", folder("/", false)), "server 127.0.0.1 did not answer within 4s")
	p.kill("u1")
	f.gone("u1")
	f.gone("u2")

	mend()
	f.volumes.cfg.NFS.Patience = time.Minute
	f.mount(one)
	f.server.Stop()
	f.gone("u1")
}
