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

// executor runs CNI plugins for libcni, with limits. It kills a plugin that hangs, together with
// its process group, and it bounds the plugin's output. It also sets environment variables for the
// Go runtime, because the plugins of the CNI project are short-lived Go programs. For them, threads
// and garbage collection cost more than they save. Other programs ignore the variables. A plugin
// passes them on to its IPAM plugin.
type executor struct {
	version.PluginDecoder
}

var _ invoke.Exec = (*executor)(nil)

var pluginEnv = []string{"GOMAXPROCS=1", "GOGC=off"}

const (
	outputLimit = 1 << 20         // bytes of each output stream of a plugin
	killWait    = 2 * time.Second // time for a killed plugin to exit
	busyRetries = 5               // retries, one second apart, while a plugin file is written
)

// FindInPath returns the path of a plugin's executable, which it searches in the directories paths.
// It implements invoke.Exec.
func (e *executor) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}

// ExecPlugin runs the plugin at path with the given standard input and environment, and returns its
// output. It returns when the plugin has exited, or shortly after ctx ends. It implements
// invoke.Exec.
func (e *executor) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	for try := 0; ; try++ {
		out, err := execOnce(ctx, path, stdin, append(environ[:len(environ):len(environ)], pluginEnv...))
		if !errors.Is(err, syscall.ETXTBSY) || try == busyRetries {
			return out, err
		}
		if err := wait.Delay(ctx, time.Second); err != nil {
			return nil, pluginError(path, err, nil, nil)
		}
	}
}

func execOnce(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	var stdout, stderr limitedOutput
	c := exec.Command(path)
	c.Env, c.Stdin, c.Stdout, c.Stderr = environ, bytes.NewReader(stdin), &stdout, &stderr
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.WaitDelay = killWait // for processes that keep the streams open after the plugin has exited
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
			_ = unix.Kill(-c.Process.Pid, unix.SIGKILL) // the leader has exited, but its process group still has the ID
			err = nil                                   // the plugin itself succeeded
		}
		if err != nil {
			return nil, pluginError(path, err, stdout.Bytes(), stderr.Bytes())
		}
		if stdout.truncated {
			return nil, pluginError(path, fmt.Errorf("its output exceeds %d bytes", outputLimit), nil, nil)
		}
		return stdout.Bytes(), nil
	case <-ctx.Done():
	}
	_ = unix.Kill(-c.Process.Pid, unix.SIGKILL)
	cause := fmt.Errorf("it did not exit in time and was killed: %w", context.Cause(ctx))
	select {
	case <-ended:
	case <-time.After(2 * killWait): // the kernel cannot kill it yet; the goroutine that waits for it will reap it
		cause = fmt.Errorf("it did not exit in time and cannot be killed: %w", context.Cause(ctx))
	}
	return nil, pluginError(path, cause, nil, nil)
}

// pluginError returns the error that a CNI plugin reported on its standard output. If stdout
// contains no error, it returns the cause together with the plugin's output.
func pluginError(path string, cause error, stdout, stderr []byte) error {
	var said types.Error
	if len(stdout) > 0 && json.Unmarshal(stdout, &said) == nil && (said.Msg != "" || said.Code != 0) {
		return &said
	}
	failed := fmt.Errorf("plugin %s failed: %w", path, cause)
	if errors.Is(cause, fs.ErrNotExist) || len(stdout)+len(stderr) == 0 {
		return failed
	}
	return fmt.Errorf("%w: its output was %q", failed,
		truncateOutput(append(bytes.TrimSpace(stdout), bytes.TrimSpace(stderr)...)))
}

func truncateOutput(b []byte) []byte { return b[:min(len(b), 1024)] }

// limitedOutput is an io.Writer that keeps the first outputLimit bytes and discards the rest.
type limitedOutput struct {
	buf       bytes.Buffer
	truncated bool
}

func (b *limitedOutput) Bytes() []byte { return b.buf.Bytes() }

func (b *limitedOutput) Write(p []byte) (int, error) {
	if room := outputLimit - b.buf.Len(); len(p) > room {
		b.truncated = true
		b.buf.Write(p[:room])
	} else {
		b.buf.Write(p)
	}
	return len(p), nil
}
