package machines

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
)

// maxSaid bounds what is read of what one command says, in bytes, from each of its two outputs.
const maxSaid = 4 << 20

// endLimit is how long a command that is to end may take to do so before the connection is ended.
const endLimit = 5 * time.Second

var errTooMuch = fmt.Errorf("it says more than %d bytes: it was ended", maxSaid)

// Failed is the error of a command that ended with another status than 0.
type Failed struct {
	Status int    // -1 when a signal ended it, or nothing was said
	Said   string // the end of what it said to its standard error, or else to its output
}

// Error implements error.
func (f *Failed) Error() string {
	if f.Said == "" {
		return fmt.Sprintf("it ended with status %d and said nothing", f.Status)
	}
	return f.Said
}

// Run has root's shell on the machine run a script, and returns what it said to its standard output. A script that fails is a
// *Failed. It is ended with ctx. What is secret belongs into input: users of the machine can see scripts.
func (m *Machine) Run(ctx context.Context, script string, input io.Reader) (string, error) {
	out, err := m.run(ctx, m.command(script), input)
	if err != nil {
		return out, fmt.Errorf("%s: %w", m.Host.Name, err)
	}
	return out, nil
}

// run has the machine's ssh server run a command.
func (m *Machine) run(ctx context.Context, command string, input io.Reader) (string, error) {
	s, err := m.client.NewSession()
	if err != nil {
		return "", fmt.Errorf("the connection has ended: %w", err)
	}
	defer s.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out, errs := &said{full: cancel}, &said{full: cancel}
	s.Stdout, s.Stderr = out, errs
	if input != nil {
		s.Stdin = input
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(command) }()
	select {
	case err = <-ended:
	case <-ctx.Done():
		go func() { // a machine that reads nothing would have us wait here
			s.Signal(ssh.SIGTERM)
			s.Close()
		}()
		select {
		case <-ended:
		case <-time.After(endLimit):
			m.Close() // it does not even say that the command has ended
			<-ended
		}
		return out.String(), context.Cause(ctx)
	}
	if cause := context.Cause(ctx); cause != nil {
		return out.String(), cause
	}
	var status *ssh.ExitError
	var none *ssh.ExitMissingError
	switch {
	case errors.As(err, &status):
		return out.String(), &Failed{Status: status.ExitStatus(), Said: lastWords(errs.String(), out.String())}
	case errors.As(err, &none):
		return out.String(), &Failed{Status: -1, Said: lastWords(errs.String(), "the connection ended before the command did")}
	}
	return out.String(), err
}

// command is what the machine's ssh server is asked for: the script in root's shell.
func (m *Machine) command(script string) string {
	c := "sh -c " + Quoted(script)
	if m.Host.SSH.User != "root" {
		c = "sudo -n " + c
	}
	return c
}

// Quoted is a text as one word of a shell.
func Quoted(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// Put writes a file of size bytes on the machine, whole or not at all, and makes all folders above it. What it says may be secret.
// Where tests say so by DESTDIR, paths begin at another root.
func (m *Machine) Put(ctx context.Context, content io.Reader, size int64, path string, mode fs.FileMode) error {
	// The file is only root's until it is whole, which its size says: a connection that is cut ends the input as well.
	script := fmt.Sprintf(`set -e; p=${DESTDIR:-}%s; umask 022; mkdir -p "$(dirname "$p")"; umask 077; trap 'rm -f "$p.part"' EXIT
cat >"$p.part"; [ "$(wc -c <"$p.part")" -eq %d ] || { echo "it came in part" >&2; exit 1; }
chmod %o "$p.part"; mv -f "$p.part" "$p"`, Quoted(path), size, mode.Perm())
	if _, err := m.Run(ctx, script, content); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

// said keeps what a command says, up to a bound.
type said struct {
	mu   sync.Mutex
	b    strings.Builder
	full context.CancelCauseFunc
}

// Write implements io.Writer.
func (w *said) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.b.Len()+len(p) > maxSaid {
		w.full(errTooMuch)
		return 0, errTooMuch
	}
	return w.b.Write(p)
}

func (w *said) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.String()
}

// joinToken is one as daemons print and take it.
var joinToken = regexp.MustCompile(`keelson1\.[^\s"']*`)

// lastWords are the last lines of the first text that says anything. They come to be in logs, where no token belongs.
func lastWords(texts ...string) string {
	for _, t := range texts {
		t = joinToken.ReplaceAllString(strings.TrimSpace(t), "keelson1...")
		if t == "" {
			continue
		}
		lines := strings.Split(t, "\n")
		lines = lines[max(0, len(lines)-12):]
		t = strings.Join(lines, "\n")
		return strings.ToValidUTF8(t[max(0, len(t)-4096):], "?")
	}
	return ""
}
