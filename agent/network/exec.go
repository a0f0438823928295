package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/wait"
)

// executor runs plugins as libcni does, and ends them: one that hangs is killed with all that it started, and what it
// says is bounded. It gives them an environment for programs that live a few milliseconds: the plugins of the CNI
// project are Go programs, for which starting more threads and collecting garbage costs more than it brings. To others
// the variables mean nothing. A plugin hands them on to the one that manages its addresses.
type executor struct {
	version.PluginDecoder
}

var _ invoke.Exec = (*executor)(nil)

var brief = []string{"GOMAXPROCS=1", "GOGC=off"}

const (
	outputLimit  = 1 << 20         // of each stream of a plugin
	killPatience = 2 * time.Second // how long a killed plugin may take to be gone
	busyRetries  = 5               // a plugin that is being written at the moment is started again a second later
)

// FindInPath implements invoke.Exec.
func (e *executor) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}

// ExecPlugin implements invoke.Exec. It returns when the plugin has ended, or soon after the end of ctx.
func (e *executor) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	for try := 0; ; try++ {
		out, err := execOnce(ctx, path, stdin, append(environ[:len(environ):len(environ)], brief...))
		if !errors.Is(err, syscall.ETXTBSY) || try == busyRetries {
			return out, err
		}
		if err := wait.Delay(ctx, time.Second); err != nil {
			return nil, pluginError(path, err, nil, nil)
		}
	}
}

func execOnce(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	var stdout, stderr bounded
	c := exec.Command(path)
	c.Env, c.Stdin, c.Stdout, c.Stderr = environ, bytes.NewReader(stdin), &stdout, &stderr
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.WaitDelay = killPatience // of what holds the streams open after the plugin's end
	if err := ctx.Err(); err != nil {
		return nil, pluginError(path, err, nil, nil)
	}
	if err := c.Start(); err != nil {
		if errors.Is(err, syscall.ETXTBSY) {
			return nil, err
		}
		return nil, pluginError(path, err, nil, nil)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	select {
	case err := <-ended:
		if errors.Is(err, exec.ErrWaitDelay) {
			_ = unix.Kill(-c.Process.Pid, unix.SIGKILL) // the leader is gone; the group still has its name
			err = nil                                   // it said what it had to say
		}
		if err != nil {
			return nil, pluginError(path, err, stdout.Bytes(), stderr.Bytes())
		}
		if stdout.over {
			return nil, pluginError(path, fmt.Errorf("its answer is over %d bytes", outputLimit), nil, nil)
		}
		return stdout.Bytes(), nil
	case <-ctx.Done():
	}
	_ = unix.Kill(-c.Process.Pid, unix.SIGKILL)
	cause := fmt.Errorf("it did not end in time and was killed: %w", context.Cause(ctx))
	select {
	case <-ended:
	case <-time.After(2 * killPatience): // the kernel holds it; whoever waits for its end reaps it then
		cause = fmt.Errorf("it did not end in time and cannot be killed: %w", context.Cause(ctx))
	}
	return nil, pluginError(path, cause, nil, nil)
}

// pluginError is what the plugin says of its failure, or what is known of it when it says nothing that can be read.
func pluginError(path string, cause error, stdout, stderr []byte) error {
	var said types.Error
	if len(stdout) > 0 && json.Unmarshal(stdout, &said) == nil && (said.Msg != "" || said.Code != 0) {
		return &said
	}
	failed := fmt.Errorf("plugin %s failed: %w", path, cause)
	if errors.Is(cause, fs.ErrNotExist) || len(stdout)+len(stderr) == 0 {
		return failed
	}
	return fmt.Errorf("%w: it said %q", failed, clip(append(bytes.TrimSpace(stdout), bytes.TrimSpace(stderr)...)))
}

func clip(b []byte) []byte { return b[:min(len(b), 1024)] }

// bounded keeps the beginning of what is written to it.
type bounded struct {
	buf  bytes.Buffer
	over bool
}

func (b *bounded) Bytes() []byte { return b.buf.Bytes() }

func (b *bounded) Write(p []byte) (int, error) {
	if room := outputLimit - b.buf.Len(); len(p) > room {
		b.over = true
		b.buf.Write(p[:room])
	} else {
		b.buf.Write(p)
	}
	return len(p), nil
}
