package node

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/image"
	"keelson.dev/keelson/csi/privatemounts"
	"keelson.dev/keelson/internal/reservedspace"
	"keelson.dev/keelson/internal/virtual"
)

// realDisk is a runtime with containers in memory and their layers and logs on a disk, with images
// of the real store. It records what is removed.
type realDisk struct {
	*fake.Runtime
	store *image.Store
	root  string                    // of the store
	takes map[string]map[string]int // by container name: sizes of "layer" and "log" in bytes, and the number of "files"

	mu    sync.Mutex
	names map[string]string // of containers
	gone  []string
}

func (d *realDisk) recordStep(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gone = append(d.gone, what)
}

func (d *realDisk) steps() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.gone)
}

func (d *realDisk) CreateContainer(ctx context.Context, q *cri.CreateContainerRequest) (
	*cri.CreateContainerResponse, error,
) {
	res, err := d.Runtime.CreateContainer(ctx, q)
	if err != nil {
		return nil, err
	}
	if _, err = d.store.PrepareRootFS(ctx, res.ContainerId, q.Config.Image.Image); err != nil {
		return nil, err
	}
	name := q.Config.Metadata.Name
	d.mu.Lock()
	d.names[res.ContainerId] = name
	d.mu.Unlock()
	log := filepath.Join(q.SandboxConfig.LogDirectory, q.Config.LogPath)
	if err = os.MkdirAll(filepath.Dir(log), 0o755); err == nil {
		err = os.WriteFile(log, make([]byte, d.takes[name]["log"]), 0o600)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(d.layer(res.ContainerId), "file"), make([]byte, d.takes[name]["layer"]), 0o600)
	}
	if err == nil {
		err = emptyFiles(d.layer(res.ContainerId), d.takes[name]["files"])
	}
	return res, err
}

func (d *realDisk) StopContainer(ctx context.Context, q *cri.StopContainerRequest) (*cri.StopContainerResponse, error) {
	d.recordStep("pod " + d.name(q.ContainerId))
	return d.Runtime.StopContainer(ctx, q)
}

func (d *realDisk) RemoveContainer(ctx context.Context, q *cri.RemoveContainerRequest) (
	*cri.RemoveContainerResponse, error,
) {
	d.recordStep("layer of " + d.name(q.ContainerId))
	res, err := d.Runtime.RemoveContainer(ctx, q)
	if err != nil {
		return nil, err
	}
	return res, d.store.RemoveRootFS(ctx, q.ContainerId)
}

// MakeRoom is the method of the store.
func (d *realDisk) MakeRoom(ctx context.Context, needed []string) (image.Removed, error) {
	done, err := d.store.MakeRoom(ctx, needed)
	if done.Images > 0 {
		d.recordStep(fmt.Sprint(done.Images, " image"))
	}
	return done, err
}

func (d *realDisk) name(container string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.names[container]
}

func (d *realDisk) layer(container string) string {
	return filepath.Join(d.root, "containers", container, "upper")
}

func (d *realDisk) written(container string) (own, shared []string) {
	return []string{d.layer(container)}, nil
}

// emptyFiles creates n empty files.
func emptyFiles(dir string, n int) error {
	for i := range n {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint("empty-", i)), nil, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// fillFolder writes an archive of an image with size bytes and a number of files.
func fillFolder(t *testing.T, dir, called string, size, files int) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	err := w.WriteHeader(&tar.Header{Name: called, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(size)})
	_, werr := w.Write(make([]byte, size))
	for i := range files {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Name: fmt.Sprint(i), Typeflag: tar.TypeReg, Mode: 0o644}))
	}
	if err = errors.Join(err, werr, w.Close()); err != nil {
		t.Fatal(err)
	}
	saveImage(t, filepath.Join(dir, called), called, layer.Bytes())
}

// Of a disk that is short first go the layers and logs of containers that have ended, then the images that these stood on, then
// the pod that has most: each only when there is too little without it, room or inodes. All of it is on a real disk, with the store
// of images and all records. F95
func TestWhatGoesOfAShortDisk(t *testing.T) {
	privatemounts.SkipUnlessPrivate(t)
	for name, c := range map[string]struct {
		short       eviction.Signal
		image, left int // of the exited container, and of the disk, in KiB or files
		want        string
	}{
		"layers and logs are enough": {eviction.Disk, 8 << 10, 7 << 10, "layer of job"},
		"images too":                 {eviction.Disk, 8 << 10, 1 << 10, "layer of job, 1 image"},
		"pods too":                   {eviction.Disk, 512, 1 << 10, "layer of job, 1 image, pod large, layer of large"},
		"inodes of layers":           {eviction.Inodes, 150, 180, "layer of job"},
		"inodes of images":           {eviction.Inodes, 150, 20, "layer of job, 1 image"},
		"inodes of pods":             {eviction.Inodes, 5, 20, "layer of job, 1 image, pod large, layer of large"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			size, files := c.image<<10, 0
			if c.short == eviction.Inodes {
				size, files = 4096, c.image
			}
			fillFolder(t, dir, "job:1", size, files)
			fillFolder(t, dir, "app:1", 64<<10, 0)
			virtual.Test(t, func(t *testing.T) { expectReclaimed(t, dir, c.short, c.left, c.want) })
		})
	}
}

// freeByOthers leaves left KiB or inodes of a disk's free space.
func freeByOthers(dir string, short eviction.Signal, free, left int) error {
	if short == eviction.Inodes {
		return emptyFiles(dir, free-left)
	}
	return os.WriteFile(filepath.Join(dir, "somebody-else"), make([]byte, free-left<<10), 0o600)
}

func expectReclaimed(t *testing.T, archives string, short eviction.Signal, left int, want string) {
	h := &restartedAgent{t: t}
	h.cfg, h.cluster, h.rt = fakeConfig("w1", t.TempDir())
	mountSmallDisk(t, h.cfg.Dirs.State, "64m,nr_inodes=2000")
	h.cfg.Node.DiskFloor, h.cfg.Node.InodeFloor, h.cfg.Dirs.Logs = reservedspace.Bytes(8<<20), reservedspace.Bytes(200),
		filepath.Join(h.cfg.Dirs.State, "logs")
	root := filepath.Join(h.cfg.Dirs.State, "images")
	h.disk = &realDisk{Runtime: h.rt, root: root, names: map[string]string{}, takes: map[string]map[string]int{
		"job":   {"layer": 4 << 20, "log": 2 << 20, "files": 150},
		"large": {"layer": 12 << 20, "log": 1 << 20, "files": 400}, "small": {"layer": 3 << 20, "files": 50}},
		store: image.New(image.Config{Root: root, Run: filepath.Join(h.cfg.Dirs.Run, "images"),
			Limits: image.Limits{Free: h.cfg.Node.DiskFloor.Half()}, Floor: h.cfg.Node.DiskFloor,
			Inodes: h.cfg.inodeFloor()})}
	h.read = func() (out [eviction.Signals]eviction.Level) {
		out = readLevels(&h.cfg)
		out[eviction.Memory] = eviction.Level{} // the machine's own
		return out
	}
	h.startAgent()
	defer func() { h.stop() }()
	for _, name := range []string{"job:1", "app:1"} {
		if _, err := h.disk.store.Import(t.Context(), filepath.Join(archives, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, of := range map[string]string{"job": "job:1", "large": "app:1", "small": "app:1"} {
		h.cluster.Put(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name),
			CreationTimestamp: metav1.Now()},
			Spec: v1.PodSpec{RestartPolicy: v1.RestartPolicyNever,
				Containers: []v1.Container{{Name: name, Image: of}}}})
	}
	virtual.Wait()
	if err := h.rt.Exit("job", "job", 0, ""); err != nil {
		t.Fatal(err)
	}
	sleepAround(10 * time.Minute) // its image was not used recently
	logs := filepath.Join(h.cfg.Dirs.Logs, "default_job_job", "job", "*")
	if found, err := filepath.Glob(logs); err != nil || len(found) != 1 {
		t.Fatalf("logs of what has ended: %q, %v", found, err)
	}
	free := int(h.read()[short].Left)
	if gone := h.disk.steps(); len(gone) > 0 || h.pressure.hasPressure(short) || free < left {
		t.Fatalf("before the disk is short %q went; %+v", gone, h.read())
	}
	if err := freeByOthers(h.cfg.Dirs.State, short, free, left); err != nil {
		t.Fatal(err)
	}
	sleepAround(10 * time.Minute)
	if got := strings.Join(h.disk.steps(), ", "); got != want || h.read()[short].IsShort() {
		t.Errorf("%s went, want %s; %+v", got, want, h.read()[short])
	}
	if found, err := filepath.Glob(logs); err != nil || len(found) > 0 {
		t.Errorf("logs of what has ended: %q, %v", found, err)
	}
	if got := h.podOf("job").Status; got.Phase != v1.PodSucceeded || len(got.ContainerStatuses) != 1 ||
		!isReady(h.podOf("small")) {
		t.Errorf("the status of the ended pod is %+v, that of the small pod %+v", got, h.podOf("small").Status)
	}
	if evicted := h.podOf("large").Status.Reason == "Evicted"; evicted != strings.Contains(want, "pod large") {
		t.Errorf("the large pod: %+v", h.podOf("large").Status)
	}
}
