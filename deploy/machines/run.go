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

// maxOutput is the maximum size in bytes of a command's standard output, and of its standard error.
const maxOutput = 4 << 20

// stopTimeout is how long Run waits for a canceled command to exit before it closes the connection.
const stopTimeout = 5 * time.Second

var errOutputTooLarge = fmt.Errorf("its output exceeds %d bytes: it was stopped", maxOutput)

// CommandError is the error of a command on a machine that exited with a nonzero status, or that a
// signal ended.
type CommandError struct {
	Status int    // -1 after a signal, or if the server sent no status
	Output string // last lines of its standard error, or of its standard output if that is empty
}

// Error returns the end of the command's output. If there was no output, it returns a text with the
// exit status.
func (f *CommandError) Error() string {
	if f.Output == "" {
		return fmt.Sprintf("it exited with status %d without output", f.Status)
	}
	return f.Output
}

// Run runs a shell script as root on the machine, with input as its standard input, and returns its
// standard output. If the script fails, the error wraps a *CommandError. If ctx is canceled, the
// script is stopped. Pass secrets in input, because users of the machine can see the text of a
// running script.
func (m *Machine) Run(ctx context.Context, script string, input io.Reader) (string, error) {
	out, err := m.runCommand(ctx, m.rootCommand(script), input)
	if err != nil {
		return out, fmt.Errorf("%s: %w", m.Host.Name, err)
	}
	return out, nil
}

// runCommand runs a command as the SSH user, with input as its standard input, and returns its
// standard output. It returns an error if the output exceeds maxOutput.
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
		go func() { // in a goroutine, because Signal blocks if the machine does not read
			s.Signal(ssh.SIGTERM)
			s.Close()
		}()
		select {
		case <-ended:
		case <-time.After(stopTimeout):
			m.Close() // the machine does not report the exit of the command
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
		return out.String(),
			&CommandError{Status: -1, Output: outputTail(errs.String(), "the connection ended before the command did")}
	}
	return out.String(), err
}

// rootCommand returns the command that runs a script in a shell as root: with sudo unless the SSH
// user is root.
func (m *Machine) rootCommand(script string) string {
	c := "sh -c " + ShellQuote(script)
	if m.Host.SSH.User != "root" {
		c = "sudo -n " + c
	}
	return c
}

// ShellQuote quotes a text as one word of a shell command.
func ShellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// WriteFile writes size bytes of content to a file on the machine, and creates its folders. The
// file appears with its complete content or not at all. Until then, only root can read it, so the
// content may be secret. For tests, the machine's environment variable DESTDIR is a prefix of the
// path.
func (m *Machine) WriteFile(ctx context.Context, content io.Reader, size int64, path string, mode fs.FileMode) error {
	// The size is compared, because the input also ends when the connection is interrupted.
	script := fmt.Sprintf(
		`set -e; p=${DESTDIR:-}%s; umask 022; mkdir -p "$(dirname "$p")"; umask 077; trap 'rm -f "$p.part"' EXIT
cat >"$p.part"; [ "$(wc -c <"$p.part")" -eq %d ] || { echo "it came in part" >&2; exit 1; }
chmod %o "$p.part"; mv -f "$p.part" "$p"`, ShellQuote(path), size, mode.Perm())
	if _, err := m.Run(ctx, script, content); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

// boundedBuffer is an io.Writer that stores up to maxOutput bytes of a command's output. On
// overflow, it calls full with errOutputTooLarge. It is safe for concurrent use.
type boundedBuffer struct {
	mu   sync.Mutex
	b    strings.Builder
	full context.CancelCauseFunc
}

// Write appends p. If the buffer would exceed maxOutput, it stores nothing of p, cancels the
// command, and returns errOutputTooLarge.
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

// joinToken matches a join token, with which a machine joins the cluster, anywhere in a text.
var joinToken = regexp.MustCompile(`keelson1\.[^\s"']*`)

// outputTail returns the end of the first text that is not blank: at most 12 lines and 4096 bytes.
// Join tokens in it are shortened to "keelson1...", because the result is logged.
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
