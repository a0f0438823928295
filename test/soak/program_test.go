package soak

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/procfs"
)

const (
	// restful is the maximum resident memory of an idle replica in bytes: the budget is 80 MiB, 36
	// MiB are measured.
	restful = 60 << 20
	// restsWithin is the time after which a replica is idle: half a minute after its last work, and
	// more on a slow machine.
	restsWithin = 3 * time.Minute
)

// A replica with nothing to do takes less than 60 MiB, leader and followers, with nodes connected, as the program that
// people run.
func TestIdleReplicaIsSmall(t *testing.T) {
	program := buildProgram(t)
	var mu sync.Mutex
	pids := map[string]int{}
	cs := startCluster(t, clusterShape{replicas: 3, nodes: 2, run: func(ctx context.Context, cfg server.Config) error {
		c := exec.CommandContext(ctx, program, "run", "--data-dir", cfg.DataDir, "--name", cfg.Name,
			"--advertise-address", cfg.Advertise,
			"--memory-limit", "1Gi")
		var told bytes.Buffer
		c.Stderr, c.Cancel, c.WaitDelay = &told, func() error { return c.Process.Signal(os.Interrupt) }, 20*time.Second
		if err := c.Start(); err != nil {
			return err
		}
		mu.Lock()
		pids[cfg.Name] = c.Process.Pid
		mu.Unlock()
		if err := c.Wait(); err != nil && ctx.Err() == nil {
			return fmt.Errorf("%s: %w\n%s", cfg.Name, err, told.Bytes())
		}
		return ctx.Err()
	}})
	if len(pids) != 3 {
		t.Fatalf("%d replicas run", len(pids))
	}
	ctx, cancel := context.WithTimeout(context.Background(), restsWithin)
	defer cancel()
	took := func() (all string, err error) {
		for _, name := range []string{"cp1", "cp2", "cp3"} {
			m, failed := procfs.ReadMemory(pids[name])
			if failed != nil {
				return "", failed
			}
			all += fmt.Sprintf("%s %.1f MiB: anonymous %.1f, of files %.1f; ", name, (m.Anonymous+m.File)/(1<<20),
				m.Anonymous/(1<<20), m.File/(1<<20))
			if m.Anonymous+m.File > restful {
				err = errors.Join(err, fmt.Errorf("%s takes more than %d MiB", name, restful>>20))
			}
		}
		return all, err
	}
	began, _ := took()
	t.Log("at the beginning ", began)
	err := wait.For(ctx, time.Second, func() error { _, err := took(); return err })
	now, _ := took()
	t.Log("at rest          ", now)
	if err != nil {
		t.Errorf("%s: %v", now, err)
	}
	checkResponds(t, cs)
}

// checkResponds checks that an idle cluster still responds.
func checkResponds(t *testing.T, cs *kubernetes.Clientset) {
	t.Helper()
	if _, err := cs.RESTClient().Get().AbsPath("/readyz").DoRaw(context.Background()); err != nil {
		t.Error(err)
	}
}

// buildProgram builds the program as the Makefile does, and checks that the linker removes unused
// methods: one call of a method by a dynamic name, such as templates make, keeps all methods of all
// types, 8 MB of them.
func buildProgram(t *testing.T) string {
	t.Helper()
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	tags := regexp.MustCompile(`(?m)^TAGS := (\S+)$`).FindSubmatch(makefile)
	if tags == nil {
		t.Fatal("the Makefile has no line of TAGS")
	}
	out := filepath.Join(t.TempDir(), "keelson-controlplane")
	c := exec.Command("go", "build", "-trimpath", "-tags", string(tags[1]), "-ldflags", "-s -w -dumpdep", "-o", out,
		"keelson.dev/keelson/cmd/controlplane")
	c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	var links bytes.Buffer
	c.Stderr = &links
	if err := c.Run(); err != nil {
		text := links.String()
		t.Fatalf("building the program: %v\n%s", err, text[max(0, len(text)-2000):])
	}
	callers := map[string]bool{}
	for line := range strings.Lines(links.String()) {
		if from, _, ok := strings.Cut(line, " <ReflectMethod> ->"); ok {
			callers[from] = true
		}
	}
	if len(callers) > 0 {
		t.Errorf("methods are called by name, so that none can be left out: %v", callers)
	}
	if info, err := os.Stat(out); err != nil {
		t.Error(err)
	} else {
		t.Logf("the program has %.1f MB", float64(info.Size())/1e6)
	}
	return out
}
