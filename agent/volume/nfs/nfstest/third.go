//go:build linux

package nfstest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/await"
)

// settings is where the programs of nfs-utils expect the settings of the kernel's server.
const settings = "/proc/fs/nfsd"

// files of the machine that the programs of nfs-utils read. The machine has none except
// /etc/passwd.
var files = map[string]string{
	"/etc/group":           "root:x:0:\nnogroup:x:65534:\n",
	"/etc/hosts":           "127.0.0.1 localhost\n",
	"/etc/services":        "sunrpc 111/tcp portmapper\nsunrpc 111/udp portmapper\nnfs 2049/tcp\nmountd 20048/tcp\n",
	"/etc/protocols":       "ip 0 IP\ntcp 6 TCP\nudp 17 UDP\n",
	"/etc/exports":         "",
	"/var/lib/nfs/etab":    "",
	"/var/lib/nfs/rmtab":   "",
	"/var/lib/nfs/state":   "",
	"/run/rpcbind/.exists": "",
}

// ServeThird makes the kernel serve dir by version 3 only, to clients at 127.0.0.1, with the
// programs that version 3 needs: rpcbind, rpc.mountd and rpc.statd.
func ServeThird(t testing.TB, dir string) {
	t.Helper()
	if _, err := exec.LookPath("rpc.mountd"); err != nil {
		t.Skip("needs: programs of nfs-utils, which scripts/setup guest unpacks from Debian's or Ubuntu's packages")
	}
	for _, d := range []string{"/run/rpcbind", "/var/lib/nfs/sm", "/var/lib/nfs/sm.bak", "/var/lib/nfs/v4recovery"} {
		requireNoError(t, os.MkdirAll(d, 0o755))
	}
	for name, text := range files {
		f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		requireNoError(t, err)
		_, err = f.WriteString(text)
		requireNoError(t, err)
		requireNoError(t, f.Close())
		t.Cleanup(func() { requireNoError(t, os.Remove(name)) })
	}
	requireNoError(t, unix.Mount("nfsd", settings, "nfsd", 0, ""))
	t.Cleanup(func() { requireNoError(t, unix.Unmount(settings, unix.MNT_DETACH)) })
	s := &Server{t: t, settingsDir: settings, recordsDir: t.TempDir(), listen: "127.0.0.1:2049"}
	startDaemon(t, "rpcbind", "-f", "-w")
	awaitListener(t, "127.0.0.1:111")
	if out, err := exec.Command("exportfs", "-o", "rw,insecure,no_subtree_check,no_root_squash,fsid=1",
		"127.0.0.1:"+dir).CombinedOutput(); err != nil {
		t.Fatalf("exportfs: %v: %s", err, out)
	}
	startDaemon(t, "rpc.mountd", "-F", "--port", "20048")
	startDaemon(t, "rpc.statd", "-F", "--no-notify")
	awaitListener(t, "127.0.0.1:20048")
	// grace period in seconds, in which no client gets a lock
	requireNoError(t, os.WriteFile("/proc/sys/fs/nfs/nlm_grace_period", []byte("1"), 0))
	s.prepareServer("+3", "-2", "-4")
	s.listenAt()
	t.Cleanup(s.Stop)
}

func requireNoError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// startDaemon runs a daemon until the end of the test.
func startDaemon(t testing.TB, program string, args ...string) {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), program))
	requireNoError(t, err)
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = log, log
	requireNoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if said, err := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("%s said: %s (%v)", program, said, err)
		}
		_ = log.Close()
	})
}

// awaitListener waits until an address accepts connections.
func awaitListener(t testing.TB, address string) {
	t.Helper()
	await.Until(t.Context(), t, await.Patience, 50*time.Millisecond, "a listener at "+address, func() error {
		return dialOnce(address)
	})
}
