package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/image"
	"keelson.dev/keelson/agent/oci"
	"keelson.dev/keelson/internal/lifecycle"
	"keelson.dev/keelson/internal/wait"
)

// keelsonRuntime creates pods through Keelson's runtime.
type keelsonRuntime struct {
	runtime *oci.Runtime
	stop    context.CancelFunc
	done    chan error
	image   string
	cgroup  string
	logs    string
}

func newKeelsonRuntime(ctx context.Context, o options, dir string, network *cniPlugins, log *slog.Logger) (
	*keelsonRuntime, error,
) {
	bin, err := filepath.Abs(o.bin)
	if err != nil {
		return nil, err
	}
	cgroup := fmt.Sprintf("/keelson-floor-%d", os.Getpid())
	store := image.New(image.Config{Root: filepath.Join(dir, "images"), Logger: log})
	rt := oci.New(oci.Config{StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"),
		ShimPath: filepath.Join(bin, "keelson-shim"), OCIPath: filepath.Join(bin, "keelson-oci"),
		PausePath:  filepath.Join(bin, "keelson-pause"),
		CgroupRoot: cgroup, Images: store, Network: network, Logger: log})
	compareRuntimes, stop := context.WithCancel(ctx)
	k := &keelsonRuntime{runtime: rt, stop: stop, done: make(chan error, 1), cgroup: cgroup,
		logs: filepath.Join(dir, "logs")}
	go func() {
		k.done <- lifecycle.Run(compareRuntimes, lifecycle.Part{Name: "images", Run: store.Run},
			lifecycle.Part{Name: "runtime", Run: rt.Run})
	}()
	names, err := store.Import(ctx, filepath.Join(o.images, "tools.tar"))
	if err == nil && len(names) == 0 {
		err = errors.New("tools.tar contains no image")
	}
	if err != nil {
		k.close()
		return nil, err
	}
	k.image = names[0]
	return k, nil
}

func (k *keelsonRuntime) close() {
	k.stop()
	if err := <-k.done; err != nil {
		fmt.Fprintln(os.Stderr, "floor:", err)
	}
	// The runtime keeps its root cgroup for its next run, but this program has no next run. Its
	// last thread may still be exiting.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	err := wait.For(ctx, 5*time.Millisecond, func() error {
		for _, pattern := range []string{"/shims", ""} {
			dirs, err := filepath.Glob("/sys/fs/cgroup/*" + k.cgroup + pattern)
			if err != nil {
				return err
			}
			for _, d := range append(dirs, "/sys/fs/cgroup"+k.cgroup+pattern) {
				if err := os.Remove(d); err != nil && !errors.Is(err, os.ErrNotExist) {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "floor:", err)
	}
}

func (k *keelsonRuntime) measurePod(ctx context.Context, i int, m durations) error {
	name := fmt.Sprintf("pod%d", i)
	sc := &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: name, Namespace: "bench", Uid: name},
		Hostname: name, LogDirectory: k.logs,
		DnsConfig: &cri.DNSConfig{Servers: []string{"192.0.2.1"}},
		Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}}}}
	begin := time.Now()
	sb, err := k.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: sc})
	if err != nil {
		return err
	}
	m.addSince("keelson: sandbox", begin)
	step := time.Now()
	c, err := k.runtime.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: sb.PodSandboxId,
		SandboxConfig: sc, Config: &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: "app"}, Image: &cri.ImageSpec{Image: k.image},
			Command: []string{"/bin/sleep", "1000"}, LogPath: name + ".log",
			Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
				NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}}}}})
	if err != nil {
		return err
	}
	m.addSince("keelson: create", step)
	step = time.Now()
	if _, err := k.runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.ContainerId}); err != nil {
		return err
	}
	m.addSince("keelson: start", step)
	m.addSince("keelson: pod", begin)
	for _, st := range append(k.runtime.StageTimes(sb.PodSandboxId), k.runtime.StageTimes(c.ContainerId)...) {
		m["keelson:   stage "+st.Name] = append(m["keelson:   stage "+st.Name], st.Duration)
	}
	step = time.Now()
	if _, err := k.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: sb.PodSandboxId}); err !=
		nil {
		return err
	}
	m.addSince("keelson: remove", step)
	return nil
}
