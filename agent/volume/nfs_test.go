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
	"keelson.dev/keelson/internal/await"
)

// nfsServer is the kernel's NFS server, and a node that mounts its folders.
type nfsServer struct {
	serverClient
	server *nfstest.Server
	dir    string // exported folder
}

func serveFiles(t *testing.T) *nfsServer {
	nfstest.Need(t)
	f := newFiles(t)
	f.server = nfstest.Serve(t, f.dir, "127.0.0.1:2049")
	f.volumes.cfg.NFS.Patience = time.Minute // the clock of a slow virtual machine may run ahead
	return f
}

// newFiles returns a folder to be exported, with a file that must persist, and the node.
func newFiles(t *testing.T) *nfsServer {
	f := &nfsServer{serverClient: serverClient{T: t}, dir: filepath.Join(t.TempDir(), "served")}
	requireNoError(t, os.MkdirAll(filepath.Join(f.dir, "data"), 0o777))
	requireNoError(t, os.WriteFile(filepath.Join(f.dir, "data", "kept"), []byte("kept"), 0o666))
	t.Cleanup(func() {
		if b, err := os.ReadFile(filepath.Join(f.dir, "data", "kept")); err != nil || string(b) != "kept" {
			t.Errorf("the server lost a file: %q, %v", b, err)
		}
	})
	f.volumes, f.cluster, _ = newVolumes(t)
	return f
}

func newNFSVolume(path string, readonly bool) v1.Volume {
	return newVolume("files",
		v1.VolumeSource{NFS: &v1.NFSVolumeSource{Server: "127.0.0.1", Path: path, ReadOnly: readonly}})
}

// newClaim stores a PersistentVolume with a folder, and a bound claim with the same name.
func (f *nfsServer) newClaim(name, path string, options ...string) {
	uid := types.UID(name)
	f.cluster.Put(
		&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: uid},
			Spec:   v1.PersistentVolumeClaimSpec{VolumeName: name},
			Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound}},
		&v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PersistentVolumeSpec{
			MountOptions: options, ClaimRef: &v1.ObjectReference{Namespace: "default", Name: name, UID: uid},
			PersistentVolumeSource: v1.PersistentVolumeSource{NFS: &v1.NFSVolumeSource{Server: "127.0.0.1",
				Path: path}}}})
}

func newClaimSource(name string) v1.Volume {
	return newVolume("files",
		v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: name}})
}

// expectMountOptions checks the options of the mount at a path.
func (f *nfsServer) expectMountOptions(place string, options ...string) {
	f.Helper()
	is, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(place))
	requireNoError(f.T, err)
	for _, option := range options {
		if len(is) != 1 || !strings.HasPrefix(is[0].FSType, "nfs") ||
			!strings.Contains(","+is[0].Options+","+is[0].VFSOptions+",", ","+option+",") {
			f.Errorf("%s is not mounted with %s: %+v", place, option, is)
		}
	}
}

// mustMount mounts the volume of a pod and returns its path.
func (f *nfsServer) mustMount(p *v1.Pod) string {
	f.Helper()
	m, err := f.volumes.MountAll(f.Context(), p)
	requireNoError(f.T, err)
	return m["files"].HostPath
}

// cutNetwork drops all packets to and from the server until mend is called.
func (f *nfsServer) cutNetwork() (mend func()) {
	f.Helper()
	const table = "table inet cut {\nchain input {\ntype filter hook input priority 0; tcp dport 2049 drop; tcp " +
		"sport 2049 drop\n}\n}"
	nft := func(text string) {
		f.Helper()
		if out, err := exec.Command("nft", text).CombinedOutput(); err != nil {
			f.Fatalf("nft: %v: %s", err, out)
		}
	}
	nft(table)
	return func() { nft("delete table inet cut") }
}

// Pods use a folder of a server inline or through a claim, with the volume's options. One pod
// writes and another one reads. F110
func TestFoldersOfAServer(t *testing.T) {
	f := serveFiles(t)
	one, two := newPod("u1", newNFSVolume("/data", false)), newPod("u2", newNFSVolume("/data", true))
	at, ro := f.mustMount(one), f.mustMount(two)
	requireNoError(t, os.WriteFile(filepath.Join(at, "new"), []byte("of one"), 0o600))
	if got := mustRead(t, filepath.Join(ro, "new")); got != "of one" {
		t.Errorf("the other pod reads %q", got)
	}
	if got := mustRead(t, filepath.Join(f.dir, "data", "new")); got != "of one" {
		t.Errorf("the server has %q", got)
	}
	if err := os.WriteFile(filepath.Join(ro, "more"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("a read-only volume was written to: %v", err)
	}
	f.newClaim("pv", "/data", "nfsvers=4.1", "noatime,soft")
	three := newPod("u3", newClaimSource("pv"))
	claimed := f.mustMount(three)
	if got := mustRead(t, filepath.Join(claimed, "new")); got != "of one" {
		t.Errorf("by a claim a pod reads %q", got)
	}
	for place, want := range map[string][]string{at: {"vers=4.2", "hard"}, claimed: {"vers=4.1", "noatime", "soft"}} {
		f.expectMountOptions(place, want...)
	}
	// Removing one pod does not affect the others.
	f.unmountPod("u1")
	if got := mustRead(t, filepath.Join(ro, "new")); got != "of one" {
		t.Errorf("the other pod reads %q", got)
	}
	f.unmountPod("u2")
	f.unmountPod("u3")
	f.unmountPod("u3")
}

// A missing or refused folder is reported by name, and mounted once the server provides it.
func TestServersThatRefuse(t *testing.T) {
	f := serveFiles(t)
	p := newPod("u1", newNFSVolume("/absent/deep", false))
	f.expectMountError(p, "NFS 127.0.0.1:/absent/deep: server 127.0.0.1 exports no /absent/deep; with version 4 the "+
		"path is relative to its root export")
	requireNoError(t, os.MkdirAll(filepath.Join(f.dir, "absent/deep"), 0o755))
	f.mustMount(p)
	f.unmountPod("u1")

	p = newPod("u2", newNFSVolume("/data", false))
	f.server.Let(false)
	f.expectMountError(p, "server 127.0.0.1 does not let this node mount /data: check its exports")
	f.server.Let(true)
	f.mustMount(p)
	f.unmountPod("u2")

	f.server.LetWrite(false)
	if err := os.WriteFile(filepath.Join(f.mustMount(p), "new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("what the server has for reading was written to: %v", err)
	}
	f.unmountPod("u2")
	f.server.Stop()
	f.expectMountError(p, "server 127.0.0.1 runs no NFS service; this is retried")
	f.server.Start()
	f.mustMount(p)
	f.unmountPod("u2")
}

// A server with version 3 only: locks need nfs-utils, or nolock.
func TestServersOfVersionThree(t *testing.T) {
	nfstest.Need(t)
	f := newFiles(t)
	nfstest.ServeThird(t, f.dir)
	f.volumes.cfg.NFS.Patience = 2 * time.Minute

	at := f.mustMount(newPod("u1", newNFSVolume(f.dir+"/data", false)))
	requireNoError(t, os.WriteFile(filepath.Join(at, "new"), []byte("of one"), 0o600))
	f.newClaim("pv", f.dir+"/data", "vers=3", "nolock")
	claimed := f.mustMount(newPod("u2", newClaimSource("pv")))
	if got := mustRead(t, filepath.Join(claimed, "new")); got != "of one" {
		t.Errorf("without locks a pod reads %q", got)
	}
	for place, want := range map[string][]string{at: {"vers=3"}, claimed: {"vers=3", "nolock"}} {
		f.expectMountOptions(place, want...)
	}
	for _, place := range []string{at, claimed} { // with locks on the server, and local locks
		file, err := os.OpenFile(filepath.Join(place, "new"), os.O_RDWR, 0)
		requireNoError(t, err)
		if err := unix.FcntlFlock(file.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
			t.Errorf("a lock at %s: %v", place, err)
		}
		requireNoError(t, file.Close())
	}
	f.unmountPod("u1")
	f.unmountPod("u2")
	f.expectMountError(newPod("u3", newNFSVolume(f.dir+"/absent", false)),
		"reason given by server: No such file or directory")
	f.newClaim("none", f.dir+"/absent", "vers=3", "nolock")
	f.expectMountError(newPod("u4", newClaimSource("none")), "server 127.0.0.1 exports no "+f.dir+"/absent")
}

// writer is the environment variable of a process that holds a file open, like a program in a pod,
// and writes to it on request.
const writer = "KEELSON_TEST_WRITES"

// runWriter runs such a process, and reports whether this process is one.
func runWriter() bool {
	path := os.Getenv(writer)
	if path == "" {
		return false
	}
	f, err := os.Create(path)
	in := bufio.NewReader(os.Stdin)
	for _, step := range []func() error{
		func() error { return err },
		func() error { _, err := f.Write(make([]byte, 1<<20)); return err }, // into the page cache
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
type startWriter struct {
	f   *nfsServer
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func (f *nfsServer) program(path string) *startWriter {
	f.Helper()
	p := &startWriter{f: f, cmd: exec.Command("/proc/self/exe")}
	p.cmd.Env = append(os.Environ(), writer+"="+path)
	in, err := p.cmd.StdinPipe()
	requireNoError(f.T, err)
	out, err := p.cmd.StdoutPipe()
	requireNoError(f.T, err)
	p.in, p.out = in, bufio.NewReader(out)
	requireNoError(f.T, p.cmd.Start())
	p.awaitStep()
	return p
}

func (p *startWriter) nextStep() {
	p.f.Helper()
	_, err := io.WriteString(p.in, "\n")
	requireNoError(p.f.T, err)
}

func (p *startWriter) awaitStep() {
	p.f.Helper()
	if line, err := p.out.ReadString('\n'); line != "done\n" {
		p.f.Fatalf("the program says %q (%v)", line, err)
	}
}

// killWriter kills the process. It exits when the pod's pending requests are aborted, because the
// kernel waits for the server.
func (p *startWriter) killWriter(uid types.UID) {
	p.f.Helper()
	requireNoError(p.f.T, p.cmd.Process.Kill())
	ended := make(chan error, 1)
	go func() { ended <- p.cmd.Wait() }()
	await.Until(p.f.Context(), p.f, await.Patience, 100*time.Millisecond, "the exit of the writer", func() error {
		select {
		case <-ended:
			return nil
		default:
		}
		return errors.Join(errors.New("a program that was killed waits for its server"),
			p.f.volumes.AbortIO(p.f.Context(), uid))
	})
}

// A hung or unreachable server blocks nobody longer than a timeout: neither a mount, nor a
// restarted agent, nor an unmount with unwritten data. Its data is not removed.
func TestServersThatHang(t *testing.T) {
	f := serveFiles(t)
	one, two := newPod("u1", newNFSVolume("/data", false)), newPod("u2", newNFSVolume("/data", false))
	at := f.mustMount(one)
	f.mustMount(two)
	p := f.program(filepath.Join(at, "new"))
	mend := f.cutNetwork()
	p.nextStep()
	p.awaitStep() // the data is in the page cache, but not on the server
	p.nextStep()  // and now it waits for the server

	f.volumes.cfg.NFS.Patience = 4 * time.Second
	next := New(*f.volumes.cfg)
	if m, err := next.MountAll(t.Context(), one); err != nil || m["files"].HostPath != at {
		t.Errorf("the next agent finds %v, %v", m, err)
	}
	f.expectMountError(newPod("u3", newNFSVolume("/", false)), "server 127.0.0.1 did not answer within 4s")
	p.killWriter("u1")
	f.unmountPod("u1")
	f.unmountPod("u2")

	mend()
	f.volumes.cfg.NFS.Patience = time.Minute
	f.mustMount(one)
	f.server.Stop()
	f.unmountPod("u1")
}
