package apiservertest

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// StockKubectls returns the paths of the upstream kubectl binaries on this machine, by name.
func StockKubectls() map[string]string {
	found := map[string]string{}
	dirs := append(filepath.SplitList(os.Getenv("PATH")), "/usr/lib/google-cloud-sdk/bin")
	for _, name := range []string{"kubectl", "kubectl.1.27", "kubectl.1.30", "kubectl.1.33"} {
		for _, dir := range dirs {
			path := filepath.Join(dir, name)
			if info, err := os.Stat(path); err == nil && info.Mode()&0o111 != 0 && found[name] == "" {
				found[name] = path
			}
		}
	}
	return found
}

// Kubectl is a kubectl binary with a kubeconfig.
type Kubectl struct {
	T      testing.TB
	Binary string
	Config string
	Home   string
}

// Run runs kubectl with the arguments and returns its output.
//
// kubectl up to 1.33 starts to read from a WebSocket before it has created its streams, and drops
// messages that arrive earlier. It reports this, and Run repeats the command. Later releases of
// client-go wait for the streams, so this is not a fault of the server.
func (k *Kubectl) Run(stdin string, args ...string) (string, error) {
	k.T.Helper()
	var out string
	var err error
	for range 5 {
		if out, err = k.Once(stdin, args...); !strings.Contains(out, "Unknown stream id") {
			break
		}
	}
	return out, err
}

// Once runs kubectl once, without the repetition that Run does, and returns its output.
func (k *Kubectl) Once(stdin string, args ...string) (string, error) {
	k.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, k.Binary, args...)
	// A short command need not collect garbage as often as a daemon.
	cmd.Env = []string{"KUBECONFIG=" + k.Config, "HOME=" + k.Home, "PATH=" + os.Getenv("PATH"), "GOGC=400"}
	cmd.Stdin = strings.NewReader(stdin)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// Ok is like Run, but fails the test if the command fails.
func (k *Kubectl) Ok(stdin string, args ...string) string {
	k.T.Helper()
	out, err := k.Run(stdin, args...)
	if err != nil {
		k.T.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// Fails is like Run, but fails the test if the command succeeds.
func (k *Kubectl) Fails(stdin string, args ...string) string {
	k.T.Helper()
	out, err := k.Run(stdin, args...)
	if err == nil {
		k.T.Fatalf("kubectl %s succeeded:\n%s", strings.Join(args, " "), out)
	}
	return out
}
