package node

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/pod"
	"keelson.dev/keelson/agent/pod/criconfig"
	"keelson.dev/keelson/agent/probe"
	"keelson.dev/keelson/csi/privatemounts"
	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/internal/wakeup"
)

// restartedAgent is a node on which agents follow each other, with pod workers and their records on
// a disk, and pressure checks. The containers are in memory and outlive the agents.
type restartedAgent struct {
	t        *testing.T
	cfg      Config
	cluster  *fake.Cluster
	rt       *fake.Runtime
	disk     *realDisk // nil: layers and images use no space
	read     func() [eviction.Signals]eviction.Level
	pressure *pressureMonitor
	stop     func()
}

// startAgent starts an agent in place of the previous one.
func (h *restartedAgent) startAgent() {
	if h.stop != nil {
		h.stop()
	}
	log := slog.New(slog.DiscardHandler)
	alike := func(context.Context) (*agent.UsageSnapshot, error) {
		u := agent.Usage{HasMemory: true, WorkingSet: mib}
		return &agent.UsageSnapshot{Pods: []agent.PodUsage{{UID: "first", Usage: u}, {UID: "second", Usage: u}}}, nil
	}
	cfg := pod.Config{Identity: pod.Identity{NodeName: "w1", HostIPs: h.cfg.NodeIPs},
		Paths: h.cfg.agentPaths(), Log: log,
		Deps: pod.Dependencies{Runtime: h.rt, Images: h.cfg.Parts.Images, Volumes: h.cfg.Parts.Volumes,
			Devices: &fake.Devices{},
			Objects: h.cluster, Reporter: h.cluster, Prober: probe.New(probe.Config{Ask: probe.AlwaysPass})},
		Containers: criconfig.Config{ResolvConf: os.DevNull}}
	p := &pressureMonitor{read: h.read, log: log, usage: podUsageReader{measure: alike}, objects: h.cluster,
		events: newThresholdEvents("w1", h.cluster), changed: wakeup.New()}
	h.pressure = p
	parts := []func(context.Context) error{}
	if d := h.disk; d != nil {
		room := &imageGC{images: d, objects: h.cluster, reporter: h.cluster, node: "w1", log: log,
			requested: wakeup.New(), isHeld: p.disk.isSparing}
		cfg.Deps.Runtime, cfg.Deps.Images, cfg.WrittenDirs, p.disk.images = d, d.store, d.written, room
		parts = append(parts, d.store.Run, room.runCollections)
	}
	set := pod.New(cfg)
	p.pods = set
	ctx, cancel := context.WithCancel(context.Background())
	parts = append(parts, set.Run, p.monitorPressure)
	done := make(chan error, len(parts))
	for _, run := range parts {
		go func() { done <- run(ctx) }()
	}
	h.stop = func() {
		cancel()
		for range parts {
			if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
				h.t.Errorf("it ended by itself: %v", err)
			}
		}
		h.stop = nil
	}
	virtual.Wait()
}

func (h *restartedAgent) podOf(uid types.UID) *v1.Pod {
	p, ok := h.cluster.Pod(uid)
	if !ok {
		h.t.Fatalf("pod %s is not there", uid)
	}
	return p
}

// mountSmallDisk mounts a separate disk at a folder until the end of the test.
func mountSmallDisk(t *testing.T, dir, size string) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// fillUp uses the last byte of a disk.
func fillUp(t *testing.T, dir string) {
	f, err := os.Create(filepath.Join(dir, "full"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, size := range []int{4096, 1} {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
}

// An agent that was killed when it had written down that a pod is evicted, and before that pod had ended, is followed by one that
// ends it, tells why, and evicts no other while that takes, though the disk is full to the last byte. The record goes with the pod.
// F95
func TestNextAgentEndsWhatWasEvicted(t *testing.T) {
	for _, short := range []eviction.Signal{eviction.Memory, eviction.Disk} {
		t.Run(short.String(), func(t *testing.T) { expectNextAgentReclaims(t, short) })
	}
}

func expectNextAgentReclaims(t *testing.T, short eviction.Signal) {
	privatemounts.SkipUnlessPrivate(t)
	virtual.Test(t, func(t *testing.T) {
		h := &restartedAgent{t: t}
		h.cfg, h.cluster, h.rt = fakeConfig("w1", t.TempDir())
		mountSmallDisk(t, h.cfg.Dirs.State, "256k")
		h.read = func() (out [eviction.Signals]eviction.Level) {
			if h.rt.Running("first", "app") != "" && h.rt.Running("second", "app") != "" {
				// there is not enough space for both
				out[short] = eviction.Level{Left: 0, Floor: 100, Known: true}
			}
			return out
		}
		h.rt.Delay("StopContainer", time.Hour) // the first agent is killed before that pod has ended
		h.startAgent()
		defer func() { h.stop() }()
		for uid, priority := range map[string]int32{"first": 0, "second": 100} {
			h.cluster.Put(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: uid, Namespace: "default", UID: types.UID(uid),
				CreationTimestamp: metav1.Now()},
				Spec: v1.PodSpec{Priority: &priority, Containers: []v1.Container{{Name: "app", Image: "hello:1"}}}})
		}
		virtual.Wait()
		running := h.podOf("first")
		record := filepath.Join(h.cfg.Dirs.State, "pods", "first", "evicted.json")
		if _, err := os.Stat(record); !os.IsNotExist(err) || !isReady(running) || !isReady(h.podOf("second")) {
			t.Fatalf("before anybody looks: %v, %+v", err, running.Status)
		}
		sleepAround(eviction.EvictionTimeout - time.Second)
		if _, err := os.Stat(record); err != nil || h.rt.Running("first", "app") == "" {
			t.Fatalf("it is not on record, or has ended: %v", err)
		}
		fillUp(t, h.cfg.Dirs.State)
		h.stop()
		h.cluster.Put(running) // the control plane has not received it either
		const takes = 25 * time.Second
		h.rt.Delay("StopContainer", takes)
		h.startAgent()
		sleepAround(takes - time.Second)
		if h.rt.Running("first", "app") == "" || !h.pressure.hasPressure(short) {
			t.Error("it has ended before its time, or the node is not short")
		}
		sleepAround(time.Minute)
		want := "The node was low on resource: " + string(short.Resource()) + ". "
		if got := h.podOf("first").Status; h.rt.Running("first", "app") != "" || got.Phase != v1.PodFailed ||
			got.Reason != "Evicted" || !strings.HasPrefix(got.Message, want) {
			t.Errorf("%+v", got)
		}
		if p := h.podOf("second"); !isReady(p) || h.pressure.evicted != [eviction.Signals]int64{} {
			t.Errorf("another is evicted for it: %+v", p.Status)
		}
		if n := h.rt.Count("StartContainer"); n != 2 {
			t.Errorf("%d starts", n)
		}
		gone := h.podOf("first").DeepCopy()
		now, none := metav1.Now(), int64(0)
		gone.DeletionTimestamp, gone.DeletionGracePeriodSeconds = &now, &none
		h.cluster.Put(gone)
		sleepAround(time.Minute)
		if _, err := os.Stat(filepath.Dir(record)); !os.IsNotExist(err) || !h.cluster.Gone("first") {
			t.Errorf("when it is deleted its record stays: %v", err)
		}
	})
}
