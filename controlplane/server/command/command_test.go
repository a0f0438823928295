package command

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// runCommandLine runs the program with arguments and returns its output and its error.
func runCommandLine(args ...string) (string, error) {
	c := New("test")
	var out bytes.Buffer
	c.SetOut(&out)
	c.SetErr(io.Discard)
	c.SetArgs(args)
	err := c.Execute()
	return out.String(), err
}

// The help of every verb has an example of the verb.
func TestHelp(t *testing.T) {
	all := New("test").Commands()
	for len(all) > 0 {
		v := all[0]
		all = append(all[1:], v.Commands()...)
		if v.Short == "" || !strings.Contains(v.Example, strings.TrimPrefix(v.CommandPath(), "keelson-controlplane ")) {
			t.Errorf("%s: no short text or no example: %q", v.CommandPath(), v.Example)
		}
	}
}

// local is an address of this machine that outgoing connections do not use.
const local = "127.0.0.21"

// initDataDir returns a data directory that init has created.
func initDataDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "data")
	if out, err := runCommandLine("init", "--name=cp1", "--data-dir="+dir, "--advertise-address="+local); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return dir
}

// Invalid flags and files are refused before anything is changed. The error names the flag or the
// file.
func TestRefusals(t *testing.T) {
	dir := initDataDir(t)
	loose := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(loose, []byte("k "+strings.Repeat("A", 43)+"=\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	junk := filepath.Join(t.TempDir(), "junk")
	if err := os.WriteFile(junk, []byte(strings.Repeat("no backup ", 1000)), 0o600); err != nil {
		t.Fatal(err)
	}
	at := []string{"--name=cp1", "--data-dir=" + dir, "--advertise-address=127.0.0.1"}
	for _, c := range []struct {
		args string
		want string
	}{
		{"run --log-store=etcd", `--log-store "etcd": want bolt or wal`},
		{"run --store-quota=much", `--store-quota "much": want a size`},
		{"run --store-quota=-1Gi", `--store-quota "-1Gi": want more than 0`},
		{"run --store-quota=1Mi", "--store-quota 1048576 bytes: want at least 16Mi"},
		{"run --snapshot-bytes=0", `--snapshot-bytes "0": want more than 0`},
		{"run --snapshot-bytes=1k", "--snapshot-bytes 1000: want at least 1Mi"},
		{"run --history-revisions=0", "--history-revisions: want more than 0"},
		{"run --history-revisions=10", "--history-revisions 10: want at least 1000"},
		{"run --history-age=-5m", "--history-age: want more than 0"},
		{"run --history-age=1ms", "--history-age 1ms: want at least 1s"},
		{"run --compare-interval=0", "--compare-interval: want more than 0"},
		{"run --rebalance-interval=1ms", "--rebalance-interval 1ms: want at least 1s"},
		{"run --replace-dead-after=29s", "--replace-dead-after 29s: want at least 30s"},
		{"run --replace-dead-after=-1m", "--replace-dead-after -1m0s: want at least 30s"},
		{"run --heartbeat-timeout=0", "--heartbeat-timeout: want more than 0"},
		{"run --heartbeat-timeout=50ms", "--heartbeat-timeout 50ms: want 200ms to 10s"},
		{"run --heartbeat-timeout=1m", "--heartbeat-timeout 1m0s: want 200ms to 10s"},
		{"run --compare-interval=1ms", "--compare-interval 1ms: want at least 1s"},
		{"run --eviction-seconds=-1", "--eviction-seconds -1"},
		{"run --encryption-keys=/does/not/exist", "--encryption-keys: "},
		{"run --encryption-keys=" + loose, loose},
		{"convert-log", `--to "": want bolt or wal`},
		{"convert-log --to=etcd", `--to "etcd": want bolt or wal`},
		{"restore", "accepts 1 arg"},
		{"restore /does/not/exist", "/does/not/exist: no such file"},
		{"restore " + junk, junk},
		{"recover", "no replica's data: run this command on a machine with a replica's disk"},
		{"convert-log --to=wal", "no replica's data"},
		{"rebuild", "--server: no other replica is known"},
		{"rebuild --server=:6445", `--server ":6445": give the address`},
	} {
		_, err := runCommandLine(append(strings.Fields(c.args), at...)...)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.args, err, c.want)
		}
	}
	for _, verb := range []string{"inspect", "rebuild", "recover", "run", "convert-log --to=wal", "restore " + junk} {
		empty := t.TempDir()
		_, err := runCommandLine(append(strings.Fields(verb), "--name=cp1", "--data-dir="+empty,
			"--advertise-address=127.0.0.1")...)
		if err == nil || !strings.Contains(err.Error(), "run 'init' on the first replica or 'join' on a further one") {
			t.Errorf("%s in a directory without a cluster: %v", verb, err)
		}
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 6 { // the files of init, and the lock
		t.Errorf("the directory after the refusals: %v %v", err, files)
	}
}

// Key files are created, extended, and listed without secrets. They are never overwritten.
func TestKeys(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	var all string
	for _, args := range [][]string{
		{"keys", "init", path, "--id=first"}, {"keys", "add", path, "--id=second"}, {"keys", "list", path},
	} {
		out, err := runCommandLine(args...)
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		all += strings.ReplaceAll(out, path, "FILE")
	}
	const want = "FILE contains key first. Copy it to every replica, and start them with --encryption-keys FILE\n" +
		"FILE now encrypts with key second. Copy the file to every replica.\n" +
		"KEY      USE\nsecond   encrypts and decrypts\nfirst    decrypts\n"
	if all != want {
		t.Errorf("got:\n%s\nwant:\n%s", all, want)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"keys", "init", path, "--id=third"}, {"keys", "add", path, "--id=first"},
		{"keys", "add", path, "--id=a b"}, {"keys", "list", path + "x"}} {
		if _, err := runCommandLine(args...); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
	if again, err := os.ReadFile(path); err != nil || !bytes.Equal(raw, again) {
		t.Errorf("a refused change changed the file: %v", err)
	}
}

// The peer CA, from its creation to the removal of the previous CA.
func TestPeerCA(t *testing.T) {
	dir, file := initDataDir(t), filepath.Join(t.TempDir(), "authority")
	at := "--data-dir=" + dir
	use := func() string {
		t.Helper()
		out, err := runCommandLine("peer-ca", "list", at)
		if err != nil {
			t.Fatal(err)
		}
		var kept []string
		for line := range strings.Lines(out) {
			f := strings.Fields(line)
			kept = append(kept, f[0]+" "+f[len(f)-1])
		}
		return strings.Join(kept[1:], ", ")
	}
	step := func(want string, args ...string) {
		t.Helper()
		if _, err := runCommandLine(append([]string{"peer-ca"}, args...)...); err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		if got := use(); got != want {
			t.Errorf("after %v: %s, want %s", args, got, want)
		}
	}
	step("keelson-ca@keelson signs", "create", file, at)
	step("keelson-ca@keelson signs, keelson-ca@keelson-peers believed", "trust", file, at)
	step("keelson-ca@keelson-peers signs, keelson-ca@keelson-peers believed, keelson-ca@keelson believed",
		"use", file, at)
	step("keelson-ca@keelson-peers signs", "prune", at)
	if _, err := runCommandLine("peer-ca", "use", filepath.Join(dir, "cluster.json"), at); err == nil {
		t.Error("a file that is not a CA was accepted")
	}
}
