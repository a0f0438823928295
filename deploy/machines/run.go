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

// maxOutput is the maximum size of each of the two outputs of a command, in bytes.
const maxOutput = 4 << 20

// stopTimeout is how long a command may take to stop before the connection is closed.
const stopTimeout = 5 * time.Second

var errOutputTooLarge = fmt.Errorf("its output exceeds %d bytes: it was stopped", maxOutput)

// CommandError is the error of a command with an exit status other than 0.
type CommandError struct {
	Status int    // -1 after a signal, or if there is no status
	Output string // the end of its standard error, or of its output if that is empty
}

// Error implements error.
func (f *CommandError) Error() string {
	if f.Output == "" {
		return fmt.Sprintf("it exited with status %d without output", f.Status)
	}
	return f.Output
}

// Run runs a script in root's shell on the machine, and returns its standard output. If the script
// fails, the error is a *CommandError. The script is stopped when ctx is canceled. Secrets belong
// into input, because users of the machine can see scripts.
func (m *Machine) Run(ctx context.Context, script string, input io.Reader) (string, error) {
	out, err := m.runCommand(ctx, m.rootCommand(script), input)
	if err != nil {
		return out, fmt.Errorf("%s: %w", m.Host.Name, err)
	}
	return out, nil
}

// runCommand runs a command on the machine's SSH server.
func (m *Machine) runCommand(ctx context.Context, command string, input io.Reader) (string, error) {
	s, err := m.client.NewSession()
	if err != nil {
		return "", fmt.Errorf("the connection has ended: %w", err)
	}
	defer s.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out, errs := &boundedBuffer{full: cancel}, &boundedBuffer{full: cancel}
	s.Stdout, s.Stderr = out, errs
	if input != nil {
		s.Stdin = input
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(command) }()
	select {
	case err = <-ended:
	case <-ctx.Done():
		go func() { // in a goroutine, because a machine that reads nothing would block it
			s.Signal(ssh.SIGTERM)
			s.Close()
		}()
		select {
		case <-ended:
		case <-time.After(stopTimeout):
			m.Close() // the machine does not even report that the command has stopped
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
		return out.String(), &CommandError{Status: status.ExitStatus(), Output: outputTail(errs.String(), out.String())}
	case errors.As(err, &none):
		return out.String(), &CommandError{Status: -1, Output: outputTail(errs.String(), "the connection ended before the command did")}
	}
	return out.String(), err
}

// rootCommand returns the command that runs a script in root's shell.
func (m *Machine) rootCommand(script string) string {
	c := "sh -c " + ShellQuote(script)
	if m.Host.SSH.User != "root" {
		c = "sudo -n " + c
	}
	return c
}

// ShellQuote quotes a text as one word of a shell command.
func ShellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// WriteFile writes a file of size bytes on the machine, completely or not at all, and creates its
// folders. The content may be secret. In tests, paths are relative to DESTDIR.
func (m *Machine) WriteFile(ctx context.Context, content io.Reader, size int64, path string, mode fs.FileMode) error {
	// The file belongs to root alone until it is complete, which its size shows: an interrupted
	// connection also ends the input.
	script := fmt.Sprintf(`set -e; p=${DESTDIR:-}%s; umask 022; mkdir -p "$(dirname "$p")"; umask 077; trap 'rm -f "$p.part"' EXIT
cat >"$p.part"; [ "$(wc -c <"$p.part")" -eq %d ] || { echo "it came in part" >&2; exit 1; }
chmod %o "$p.part"; mv -f "$p.part" "$p"`, ShellQuote(path), size, mode.Perm())
	if _, err := m.Run(ctx, script, content); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

// boundedBuffer collects the output of a command up to a limit.
type boundedBuffer struct {
	mu   sync.Mutex
	b    strings.Builder
	full context.CancelCauseFunc
}

// Write implements io.Writer.
func (w *boundedBuffer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.b.Len()+len(p) > maxOutput {
		w.full(errOutputTooLarge)
		return 0, errOutputTooLarge
	}
	return w.b.Write(p)
}

func (w *boundedBuffer) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.String()
}

// joinToken matches a join token.
var joinToken = regexp.MustCompile(`keelson1\.[^\s"']*`)

// outputTail returns the last lines of the first text that is not empty. Tokens are removed,
// because the result is logged.
func outputTail(texts ...string) string {
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
