package machines

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"keelson.dev/keelson/test/testenv/sshd"
)

// newSSHD is a server, and the host as which it is reached.
func newSSHD(t *testing.T, name string, env ...string) (*sshd.Server, Host) {
	t.Helper()
	s := sshd.New(t, env...)
	return s, Host{Name: name, Address: "127.0.0.1",
		SSH: SSH{Address: "127.0.0.1", Port: s.Port, User: "root", Key: s.Key, KnownHosts: s.KnownHosts}}
}

func connected(t *testing.T, h Host) *Machine {
	t.Helper()
	m, err := Dial(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// A machine runs scripts, whatever characters are in them, takes files with their modes, and says what went wrong.
func TestRunAndPut(t *testing.T) {
	_, h := newSSHD(t, "cp1", "PATH="+os.Getenv("PATH"))
	m := connected(t, h)
	if out, err := m.Run(t.Context(), `printf '%s|' 'it'"'"'s' "a b"; cat`, strings.NewReader("input")); err != nil ||
		out != "it's|a b|input" {
		t.Errorf("said %q (%v)", out, err)
	}
	_, err := m.Run(t.Context(), "echo first; echo 'no room' >&2; exit 3", nil)
	var failed *CommandError
	if !errors.As(err, &failed) || failed.Status != 3 || failed.Output != "no room" ||
		!strings.HasPrefix(err.Error(), "cp1: ") {
		t.Errorf("%v: want status 3 of cp1 and the last words", err)
	}
	// What a daemon prints when it makes a cluster are tokens that let anybody in: an error of it may come to be in a log.
	_, err = m.Run(t.Context(), `echo "replicas: keelson1.controlplane.abc.SECRET.hash
workers: 'keelson1.node.abc.$(printf '%04096d' 0)SECRET.hash'" >&2; exit 1`, nil)
	if !errors.As(err, &failed) || failed.Output != "replicas: keelson1...\nworkers: 'keelson1...'" {
		t.Errorf("%v: want the last words, and no token", err)
	}
	path := filepath.Join(t.TempDir(), "it's below", "file")
	content := bytes.Repeat([]byte("0123456789\n"), 100_000)
	if err := m.WriteFile(t.Context(), bytes.NewReader(content), int64(len(content)), path, 0o640); err != nil {
		t.Fatal(err)
	}
	is, err := os.ReadFile(path)
	info, err2 := os.Stat(path)
	if err != nil || err2 != nil || !bytes.Equal(is, content) || info.Mode().Perm() != 0o640 {
		t.Errorf("the file has %d bytes and the mode %v (%v)", len(is), info.Mode(), err)
	}
	// What ends too early is not put in the place of what was there.
	if err := m.WriteFile(t.Context(), strings.NewReader("half"), 100, path, 0o640); err == nil ||
		!strings.Contains(err.Error(), "in part") {
		t.Errorf("%v: want that it came in part", err)
	}
	if again, _ := os.ReadFile(path); !bytes.Equal(again, content) {
		t.Error("a file that came in part was put in place")
	}
	if left, _ := filepath.Glob(path + ".*"); len(left) > 0 {
		t.Errorf("%v were left", left)
	}
}

// Somebody who is not root becomes root by sudo, and is not asked.
func TestRunBySudo(t *testing.T) {
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "sudo"),
		[]byte("#!/bin/sh\n[ \"$1\" = -n ] || exit 9\nshift; echo by sudo; exec \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, h := newSSHD(t, "cp1", "PATH="+bin+":"+os.Getenv("PATH"))
	h.SSH.User = "admin"
	if out, err := connected(t, h).Run(t.Context(), "echo 'a b'", nil); err != nil || out != "by sudo\na b\n" {
		t.Errorf("said %q (%v)", out, err)
	}
}

// A machine that is not known, or is another one than the one that was, is sent nothing.
func TestHostKeys(t *testing.T) {
	s, h := newSSHD(t, "cp1")
	other, _ := sshd.NewKey(t)
	refused := func(name string, h Host, want ...string) {
		t.Helper()
		m, err := Dial(t.Context(), h)
		if err == nil {
			m.Close()
			t.Fatalf("%s: it was connected", name)
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v\nwants %q", name, err, w)
			}
		}
	}
	file := func(lines ...string) string {
		path := filepath.Join(t.TempDir(), "known_hosts")
		if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	changed := h
	changed.SSH.KnownHosts = file(knownhosts.Line([]string{knownhosts.Normalize(s.Address)}, other.PublicKey()))
	refused("changed", changed, "reaching cp1", "HAS CHANGED", ssh.FingerprintSHA256(s.HostKey.PublicKey()),
		ssh.FingerprintSHA256(other.PublicKey()), "ssh-keygen -R")
	unknown := h
	unknown.SSH.KnownHosts = file("")
	refused("unknown", unknown, "is not in "+unknown.SSH.KnownHosts,
		ssh.FingerprintSHA256(s.HostKey.PublicKey()), "ssh -p")
	missing := h
	missing.SSH.KnownHosts = filepath.Join(t.TempDir(), "none")
	refused("no file", missing, "is not in ")
	pinned := h
	pinned.SSH.HostKey = string(ssh.MarshalAuthorizedKey(other.PublicKey()))
	refused("pinned", pinned, "ssh.hostKey is "+ssh.FingerprintSHA256(other.PublicKey()), "another machine")
	pinned.SSH.HostKey, pinned.SSH.KnownHosts = string(ssh.MarshalAuthorizedKey(s.HostKey.PublicKey())), file("")
	connected(t, pinned)
	if s.Received("") {
		t.Errorf("commands were sent: %v", s.Commands())
	}
}

// An error explains the remedy if the machine accepts none of the keys, and if a named file is not
// a key.
func TestWrongKeys(t *testing.T) {
	_, h := newSSHD(t, "cp1")
	_, private := sshd.NewKey(t)
	wrong := filepath.Join(t.TempDir(), "wrong")
	if err := os.WriteFile(wrong, private, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{wrong: "authorized_keys",
		filepath.Join(t.TempDir(), "none"): "no such file", t.TempDir(): "no file with a private key"} {
		h.SSH.Key = path
		if m, err := Dial(t.Context(), h); err == nil {
			m.Close()
			t.Errorf("%s opened the door", path)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("%v\nwants %q", err, want)
		}
	}
}

// A machine that says nothing, at the door or later, holds nobody up for longer than he wants to wait.
func TestSilence(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s, h := newSSHD(t, "cp1", "PATH="+os.Getenv("PATH"))
	silent := h
	silent.SSH.Port = l.Addr().(*net.TCPAddr).Port
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if m, err := Dial(ctx, silent); err == nil {
		m.Close()
		t.Error("who says nothing was connected")
	} else if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v: want that the time was over", err)
	}
	m := connected(t, h)
	s.SetFault(func(c string) sshd.Fault {
		if strings.Contains(c, "mute") {
			return sshd.Mute
		}
		return sshd.None
	})
	for _, script := range []string{"echo mute", "sleep 1000"} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if _, err := m.Run(ctx, script, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v: want that the time was over", script, err)
		}
		cancel()
	}
	if out, err := m.Run(t.Context(), "echo still there", nil); err != nil || out != "still there\n" {
		t.Errorf("afterwards it says %q (%v)", out, err)
	}
}

// What never ends is ended, and the machine goes on being of use.
func TestEndlessOutput(t *testing.T) {
	_, h := newSSHD(t, "cp1", "PATH="+os.Getenv("PATH"))
	m := connected(t, h)
	for _, script := range []string{"yes", "yes >&2"} {
		out, err := m.Run(t.Context(), script, nil)
		if !errors.Is(err, errOutputTooLarge) {
			t.Errorf("%s: %v: want that it is too much", script, err)
		}
		if len(out) > maxOutput {
			t.Errorf("%s: %d bytes were kept", script, len(out))
		}
	}
	if out, err := m.Run(t.Context(), "echo still there", nil); err != nil || out != "still there\n" {
		t.Errorf("afterwards it says %q (%v)", out, err)
	}
}

// A connection that is cut in the middle is an error, and not an answer.
func TestCutOff(t *testing.T) {
	s, h := newSSHD(t, "cp1", "PATH="+os.Getenv("PATH"))
	for _, f := range []sshd.Fault{sshd.CutFirst, sshd.CutLater} {
		m := connected(t, h)
		s.SetFault(func(c string) sshd.Fault { return f })
		if out, err := m.Run(t.Context(), "echo cut here", nil); err == nil {
			t.Errorf("fault %d: said %q", f, out)
		}
	}
}
