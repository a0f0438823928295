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
	"keelson.dev/keelson/internal/floor"
	"keelson.dev/keelson/internal/virtual"
)

// realDisk is a runtime whose containers run in memory, while their layers and logs lie on a disk, above images of the real store. It
// notes what goes.
type realDisk struct {
	*fake.Runtime
	store *image.Store
	root  string                    // of the store
	takes map[string]map[string]int // by container name: what "layer" and "log" take, in bytes

	mu    sync.Mutex
	names map[string]string // of containers
	gone  []string
}

func (d *realDisk) note(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gone = append(d.gone, what)
}

func (d *realDisk) went() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.gone)
}

func (d *realDisk) CreateContainer(ctx context.Context, q *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error) {
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
	return res, err
}

func (d *realDisk) StopContainer(ctx context.Context, q *cri.StopContainerRequest) (*cri.StopContainerResponse, error) {
	d.note("pod " + d.name(q.ContainerId))
	return d.Runtime.StopContainer(ctx, q)
}

func (d *realDisk) RemoveContainer(ctx context.Context, q *cri.RemoveContainerRequest) (*cri.RemoveContainerResponse, error) {
	d.note("layer of " + d.name(q.ContainerId))
	res, err := d.Runtime.RemoveContainer(ctx, q)
	if err != nil {
		return nil, err
	}
	return res, d.store.RemoveRootFS(ctx, q.ContainerId)
}

// MakeRoom is the store's.
func (d *realDisk) MakeRoom(ctx context.Context, needed []string) (image.Removed, error) {
	done, err := d.store.MakeRoom(ctx, needed)
	if done.Images > 0 {
		d.note(fmt.Sprint(done.Images, " image"))
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

// filled writes an archive of an image that takes so many bytes.
func filled(t *testing.T, dir, called string, size int) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	err := w.WriteHeader(&tar.Header{Name: called, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(size)})
	_, werr := w.Write(make([]byte, size))
	if err = errors.Join(err, werr, w.Close()); err != nil {
		t.Fatal(err)
	}
	saveImage(t, filepath.Join(dir, called), called, layer.Bytes())
}

// Of a disk that is short first go the layers and logs of containers that have ended, then the images that these stood on, then
// the pod that has most: each only when there is too little without it. All of it is on a real disk, with the store of images and
// all records. F95
func TestWhatGoesOfAShortDisk(t *testing.T) {
	privatemounts.Need(t)
	for name, c := range map[string]struct {
		image, left int // of the one that has ended, and of the disk, in KiB
		want        string
	}{
		"layers and logs are enough": {8 << 10, 7 << 10, "layer of job"},
		"images too":                 {8 << 10, 1 << 10, "layer of job, 1 image"},
		"pods too":                   {512, 1 << 10, "layer of job, 1 image, pod large, layer of large"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			filled(t, dir, "job:1", c.image<<10)
			filled(t, dir, "app:1", 64<<10)
			virtual.Test(t, func(t *testing.T) { goesOfDisk(t, dir, int64(c.left)<<10, c.want) })
		})
	}
}

func goesOfDisk(t *testing.T, archives string, left int64, want string) {
	h := &heir{t: t}
	h.cfg, h.cluster, h.rt = fakeConfig("w1", t.TempDir())
	smallDisk(t, h.cfg.StateDir, "64m")
	h.cfg.DiskFloor, h.cfg.LogDir = floor.Bytes(8<<20), filepath.Join(h.cfg.StateDir, "logs")
	root := filepath.Join(h.cfg.StateDir, "images")
	h.disk = &realDisk{Runtime: h.rt, root: root, names: map[string]string{}, takes: map[string]map[string]int{
		"job": {"layer": 4 << 20, "log": 2 << 20}, "large": {"layer": 12 << 20, "log": 1 << 20}, "small": {"layer": 3 << 20}},
		store: image.New(image.Config{Root: root, Run: filepath.Join(h.cfg.RunDir, "images"), Limits: image.Limits{Free: h.cfg.DiskFloor.Half()}, Floor: h.cfg.DiskFloor})}
	h.read = func() (out [eviction.Signals]eviction.Level) {
		out[eviction.Disk] = levels(&h.cfg)[eviction.Disk]
		return out
	}
	h.start()
	defer func() { h.stop() }()
	for _, name := range []string{"job:1", "app:1"} {
		if _, err := h.disk.store.Import(t.Context(), filepath.Join(archives, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, of := range map[string]string{"job": "job:1", "large": "app:1", "small": "app:1"} {
		h.cluster.Put(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name), CreationTimestamp: metav1.Now()},
			Spec: v1.PodSpec{RestartPolicy: v1.RestartPolicyNever, Containers: []v1.Container{{Name: name, Image: of}}}})
	}
	virtual.Wait()
	if err := h.rt.Exit("job", "job", 0, ""); err != nil {
		t.Fatal(err)
	}
	sleep(10 * time.Minute) // nobody has used its image lately
	logs := filepath.Join(h.cfg.LogDir, "default_job_job", "job", "*")
	if found, err := filepath.Glob(logs); err != nil || len(found) != 1 {
		t.Fatalf("logs of what has ended: %q, %v", found, err)
	}
	_, free, err := disk(h.cfg.StateDir)
	if gone := h.disk.went(); err != nil || len(gone) > 0 || h.pressure.holds(eviction.Disk) || free < 2*left {
		t.Fatalf("before the disk is short %q went; %d bytes are free, %v", gone, free, err)
	}
	if err := os.WriteFile(filepath.Join(h.cfg.StateDir, "somebody-else"), make([]byte, free-left), 0o600); err != nil {
		t.Fatal(err)
	}
	sleep(10 * time.Minute)
	if got := strings.Join(h.disk.went(), ", "); got != want || h.read()[eviction.Disk].Short() {
		t.Errorf("%s went, want %s; %+v", got, want, h.read()[eviction.Disk])
	}
	if found, err := filepath.Glob(logs); err != nil || len(found) > 0 {
		t.Errorf("logs of what has ended: %q, %v", found, err)
	}
	if got := h.pod("job").Status; got.Phase != v1.PodSucceeded || len(got.ContainerStatuses) != 1 || !isReady(h.pod("small")) {
		t.Errorf("what has ended is told as %+v, the small pod as %+v", got, h.pod("small").Status)
	}
	if evicted := h.pod("large").Status.Reason == "Evicted"; evicted != strings.Contains(want, "pod large") {
		t.Errorf("the large pod: %+v", h.pod("large").Status)
	}
}
