package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/internal/wait"
)

var rewrite = flag.Bool("rewrite", false, "overwrite the transcript in testdata with the current output")

// assignPorts assigns free ports to a new cluster.
func assignPorts(t *testing.T, dir string) (url string) { return assignPortsAt(t, dir, local) }

func assignPortsAt(t *testing.T, dir, address string) (url string) {
	t.Helper()
	path := filepath.Join(dir, "cluster.json")
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var cluster map[string]any
	if err := json.Unmarshal(raw, &cluster); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"apiPort", "fleetPort", "peerPort"} {
		// Below the range from which the kernel assigns ports, so that no concurrent test gets the
		// port.
		var l net.Listener
		port := 0
		for l == nil {
			port = 20000 + rand.IntN(10000)
			l, _ = net.Listen("tcp", fmt.Sprintf("%s:%d", address, port))
		}
		defer l.Close()
		cluster[name] = port
	}
	if raw, err = json.Marshal(cluster); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("https://%s:%v", address, cluster["apiPort"])
}

// runReplica runs the replica of a data directory while do runs.
func runReplica(t *testing.T, dir, url string, do func(*http.Client)) {
	t.Helper()
	runUntilDone(t, dir, url, func(ctx context.Context) error {
		return server.Run(ctx, server.Config{
			Name: "cp1", DataDir: dir, Process: server.ProcessConfig{Version: "test",
				Log: slog.New(slog.DiscardHandler)},
		})
	}, do)
}

// runUntilDone runs the replica function, and calls do when the replica is ready.
func runUntilDone(t *testing.T, dir, url string, replica func(context.Context) error, do func(*http.Client)) {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", filepath.Join(dir, "admin.kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ready, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	ended := make(chan error, 1)
	go func() {
		ended <- replica(ctx)
		stop()
	}()
	err = wait.For(ready, 20*time.Millisecond, func() error {
		resp, err := client.Get(url + "/readyz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				err = errors.New(resp.Status)
			}
		}
		return err
	})
	if err == nil {
		do(client)
	}
	cancel()
	if err := errors.Join(err, <-ended); err != nil {
		t.Fatal(err)
	}
}

// After init, run needs no other flag, file or variable for the address.
func TestRunAfterInit(t *testing.T) {
	dir := initDataDir(t)
	url := assignPorts(t, dir)
	of := []string{"--name=cp1", "--data-dir=" + dir, "--shutdown-delay-duration=0s", "--config="}
	if out, err := runCommandLine(append([]string{"check"}, of...)...); err != nil || out != "" {
		t.Errorf("check: %v: %s", err, out)
	}
	runUntilDone(t, dir, url, func(ctx context.Context) error {
		c := New("test")
		c.SetArgs(append([]string{"run"}, of...))
		return c.ExecuteContext(ctx)
	}, func(*http.Client) {})
}

// replacements replaces the parts of the transcript that differ between runs.
var replacements = []struct {
	is   *regexp.Regexp
	says string
}{
	{regexp.MustCompile(`keelson-[0-9a-f]{16}`), "keelson-<id>"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`), "<time>"},
	{regexp.MustCompile(`init-\d{8}-\d{6}-[0-9a-f]{8}`), "init-<time>"},
	{regexp.MustCompile(`aside-[0-9T.]+`), "aside-<time>"},
	{regexp.MustCompile(`127\.0\.0\.21:\d+`), "127.0.0.21:<port>"},
	{regexp.MustCompile(`(last entry +)\d+`), "$1<n>"},
	{regexp.MustCompile(`(entry|entries|to|of|revision|term) \d+`), "$1 <n>"},
	{regexp.MustCompile(`\d+ (keys|bytes|entries)|\d+\.\d MiB`), "<n>"},
	{regexp.MustCompile(`snapshots/\S+:`), "snapshots/<name>:"},
	{regexp.MustCompile(`, <n>, <n>, format \d+`), ", <n>, <n>, format <n>"},
}

// The output of the verbs on the data directory of a stopped replica.
func TestOfflineVerbs(t *testing.T) {
	dir := initDataDir(t)
	url := assignPorts(t, dir)
	backup, damaged := filepath.Join(t.TempDir(), "today"), filepath.Join(t.TempDir(), "damaged")
	runReplica(t, dir, url, func(client *http.Client) {
		resp, err := client.Post(url+api.PathClusterBackup, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		raw, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%v %s", err, resp.Status)
		}
		if err := os.WriteFile(backup, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		raw[len(raw)/2] ^= 1
		if err := os.WriteFile(damaged, raw, 0o600); err != nil {
			t.Fatal(err)
		}
	})
	var out bytes.Buffer
	for _, line := range []string{
		"inspect", "convert-log --to wal", "inspect", "verify TODAY", "verify DAMAGED",
		"restore TODAY", "restore DAMAGED --replace", "restore TODAY --replace", "inspect",
		"recover", "recover < WRONG", "recover < RIGHT", "recover --unsafe-lost-majority", "recover --name cp2",
		"rebuild", "rebuild --server 192.0.2.12", "inspect", "convert-log --to bolt",
	} {
		fmt.Fprintf(&out, "$ keelson-controlplane %s\n", line)
		args := strings.Fields(strings.NewReplacer("TODAY", backup, "DAMAGED", damaged).Replace(line))
		args = append(args, "--data-dir="+dir)
		if args[0] != "verify" && !strings.Contains(line, "--name") {
			args = append(args, "--name=cp1")
		}
		text, err := runWithInput(args)
		if out.WriteString(text); err != nil {
			fmt.Fprintf(&out, "keelson-controlplane: %v\n", err)
		}
		out.WriteString("\n")
	}
	got := strings.NewReplacer(dir, "DATA", backup, "TODAY", damaged, "DAMAGED").Replace(out.String())
	for _, v := range replacements {
		got = v.is.ReplaceAllString(got, v.says)
	}
	path := filepath.Join("testdata", "offline.txt")
	if *rewrite {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (-rewrite updates the file); got:\n%s", path, got)
	}
}

// runWithInput runs a verb. If the line has a redirection, it provides the named input as a
// terminal.
func runWithInput(args []string) (string, error) {
	typed := map[string]string{"WRONG": "yes\nkeelson-2\nkeelson\n", "RIGHT": "kelson\nkeelson\n"}
	if len(args) < 3 || args[1] != "<" {
		return runCommandLine(args...)
	}
	c := New("test")
	var out bytes.Buffer
	c.SetIn(strings.NewReader(typed[args[2]]))
	c.SetOut(&out)
	c.SetErr(io.Discard)
	c.SetArgs(append(args[:1:1], args[3:]...))
	err := c.Execute()
	return out.String() + "\n", err
}
