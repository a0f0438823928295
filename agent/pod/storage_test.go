package pod

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/virtual"
)

func fill(t *testing.T, size int, path ...string) {
	t.Helper()
	file := filepath.Join(path...)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(strings.Repeat("x", size)), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A pod that exceeds its storage limit is evicted with Kubernetes' message.
func TestStorageLimitsEvict(t *testing.T) {
	const mi = 1 << 20
	limit := func(q string) v1.ResourceRequirements {
		return v1.ResourceRequirements{Limits: v1.ResourceList{v1.ResourceEphemeralStorage: resource.MustParse(q)}}
	}
	for name, c := range map[string]struct {
		change func(p *v1.Pod)
		write  func(volumes, layer, shared, logs string)
		want   string // expected message; "" = not evicted
	}{
		"an emptyDir within its limit": {func(p *v1.Pod) { p.Spec.Volumes[0].EmptyDir.SizeLimit = ptr(resource.MustParse("2Mi")) },
			func(volumes, _, _, _ string) { fill(t, mi, volumes, "data", "file") }, ""},
		"an emptyDir beyond it": {func(p *v1.Pod) { p.Spec.Volumes[0].EmptyDir.SizeLimit = ptr(resource.MustParse("1Mi")) },
			func(volumes, _, _, _ string) { fill(t, 2*mi, volumes, "data", "deep", "down", "file") },
			`Usage of EmptyDir volume "data" exceeds the limit "1Mi". `},
		"a container's layer": {func(p *v1.Pod) { p.Spec.Containers[0].Resources = limit("1Mi") },
			func(_, layer, _, _ string) { fill(t, 2*mi, layer, "file") },
			`Pod ephemeral local storage usage exceeds the total limit of containers 1Mi. `},
		"its log": {func(p *v1.Pod) {
			p.Spec.Containers[0].Resources = limit("1Mi")
			p.Spec.Containers[1].Resources = limit("9Mi")
		},
			func(_, _, _, logs string) { fill(t, 2*mi, logs, "app", "0.log") },
			`Container app exceeded its local ephemeral storage limit "1Mi". `},
		"volumes and what containers share": {func(p *v1.Pod) { p.Spec.Containers[0].Resources = limit("3Mi") },
			func(volumes, _, shared, _ string) {
				fill(t, 2*mi, volumes, "data", "f")
				fill(t, 2*mi, shared, "resolv.conf")
			},
			`Pod ephemeral local storage usage exceeds the total limit of containers 3Mi. `},
		"folders without end": {func(p *v1.Pod) { p.Spec.Volumes[0].EmptyDir.SizeLimit = ptr(resource.MustParse("900Mi")) },
			func(volumes, _, _, _ string) {
				if err := os.MkdirAll(filepath.Join(volumes, "data", strings.Repeat("d/", maxDepth+1)), 0o700); err != nil {
					t.Error(err)
				}
			},
			"Usage of local ephemeral storage cannot be held against its limits: folders lie more than 256 deep in one another. "},
		"another pod's": {func(p *v1.Pod) { p.Spec.Containers[0].Resources = limit("3Mi") },
			func(volumes, _, _, _ string) { fill(t, 9*mi, volumes, "..", "u2", "data", "f") }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				n := newNode(t)
				dir := t.TempDir()
				n.vol.Root = filepath.Join(dir, "volumes")
				n.cfg.Written = func(id string) (own, shared []string) {
					if id != n.rt.Running("u1", "app") {
						return nil, []string{dir + "/shared"}
					}
					return []string{dir + "/layer"}, []string{dir + "/shared"}
				}
				n.start()
				defer func() { n.stop() }()
				p := simplePod("u1", v1.Container{Name: "app", Image: "hello:1"}, v1.Container{Name: "other", Image: "hello:1"})
				p.Spec.Volumes = []v1.Volume{{Name: "data", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}}
				c.change(p)
				n.cluster.Put(p)
				time.Sleep(2 * measureEvery) // virtual time
				virtual.Wait()
				if st := n.pod("u1").Status; st.Phase != v1.PodRunning {
					t.Fatalf("before anything was written: %+v", st)
				}
				c.write(filepath.Join(n.vol.Root, "u1"), dir+"/layer", dir+"/shared", logDirectory(n.cfg.Paths.Logs, p))
				time.Sleep(2*measureEvery + evictionGrace)
				virtual.Wait()
				st := n.pod("u1").Status
				if c.want == "" {
					if st.Phase != v1.PodRunning {
						t.Errorf("it went: %s %q", st.Reason, st.Message)
					}
					return
				}
				if st.Phase != v1.PodFailed || st.Reason != "Evicted" || st.Message != c.want {
					t.Errorf("phase %s, reason %s, message %q, want %q", st.Phase, st.Reason, st.Message, c.want)
				}
				if e := strings.Join(n.cluster.Events("u1"), "\n"); !strings.Contains(e, "Evicted "+c.want) {
					t.Errorf("events: %s", e)
				}
				if n.rt.Running("u1", "app") != "" || n.rt.Running("u1", "other") != "" {
					t.Error("its containers go on")
				}
			})
		})
	}
}

func ptr[T any](v T) *T { return &v }

func TestUsage(t *testing.T) {
	dir, turns := t.TempDir(), newTurns()
	outside := t.TempDir()
	fill(t, 1<<20, outside, "big")
	size := func(enough int64) int64 {
		t.Helper()
		n, err := usage(context.Background(), turns, filepath.Join(dir, "here"), enough)
		if err != nil || len(turns) != 0 {
			t.Fatal(n, err, len(turns))
		}
		return n.bytes
	}
	if n := size(1 << 30); n != 0 {
		t.Errorf("nothing has %d bytes", n)
	}
	fill(t, 64<<10, dir, "here", "a", "b", "file")
	base := size(1 << 30)
	if base < 64<<10 || base > 96<<10 {
		t.Errorf("64 KiB are %d", base)
	}
	here := filepath.Join(dir, "here")
	// Symlinks are not followed, hard links count once, holes have no size, and a FIFO does not
	// block.
	for _, err := range []error{os.Symlink(outside, here+"/link"), os.Symlink("/", here+"/a/root"), os.Link(here+"/a/b/file", here+"/again"),
		mkfifo(here + "/fifo"), os.WriteFile(here+"/sparse", nil, 0o600), os.Truncate(here+"/sparse", 1<<40)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if n := size(1 << 30); n < base || n > base+16<<10 {
		t.Errorf("with links: %d, without: %d", n, base)
	}
	for i := range 3 * chunk {
		fill(t, 1, here, "many", string(rune('a'+i%26)), "f"+string(rune('a'+i/26%26))+string(rune('a'+i/676)))
	}
	all := size(1 << 30)
	if all < base+3*chunk*512 {
		t.Errorf("many small files are %d", all)
	}
	if n := size(base); n <= base || n >= all {
		t.Errorf("a walk that has found enough goes on: %d of %d", n, all)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	turns <- struct{}{}
	if _, err := usage(ctx, turns, here, 1<<30); err == nil {
		t.Error("a walk does not end with its context")
	}
}

// Mounts below a pod's directory, such as subPaths, do not count, even on the same file system.
func TestUsageLeavesMountsOut(t *testing.T) {
	needRoot(t)
	dir, volume := t.TempDir(), t.TempDir()
	fill(t, 4<<20, volume, "sub", "big")
	fill(t, 4096, dir, "own")
	for sub, target := range map[string]string{"sub": dir + "/subpaths/app/0", "sub/big": dir + "/subpaths/app/1"} {
		if _, err := (&BindSubPaths{}).Bind(t.Context(), target, volume, sub); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := (&BindSubPaths{}).Release(dir); err != nil {
			t.Error(err)
		}
	})
	if n, err := usage(t.Context(), newTurns(), dir, 1<<40); err != nil || n.bytes > 1<<20 {
		t.Errorf("%d bytes, %v", n, err)
	}
	if n, err := usage(t.Context(), newTurns(), volume, 1<<40); err != nil || n.bytes < 4<<20 {
		t.Errorf("of the volume itself: %d bytes, %v", n, err)
	}
}

// Files and directories count one inode each; a file with several names counts once. F95
func TestUsageCountsInodes(t *testing.T) {
	dir := t.TempDir()
	fill(t, 1, dir, "a")
	fill(t, 0, dir, "sub", "b")
	fill(t, 1, dir, "sub", "c")
	if err := os.Link(filepath.Join(dir, "sub", "c"), filepath.Join(dir, "again")); err != nil {
		t.Fatal(err)
	}
	if n, err := usage(t.Context(), newTurns(), dir, 1<<40); err != nil || n.milli != 5000 {
		t.Errorf("%d thousandths, %v", n.milli, err)
	}
}

// Excessively nested directories are skipped, and those beside them are counted. A walk's memory is
// bounded whatever the number of directories.
func TestUsageOfDeepFolders(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for at, i := root, 0; i < 3*maxDepth; i++ {
		if err := at.Mkdir("d", 0o700); err != nil {
			t.Fatal(err)
		}
		next, err := at.OpenRoot("d")
		if err != nil {
			t.Fatal(err)
		}
		defer next.Close()
		at = next
	}
	fill(t, 2<<20, dir, "z", "big")
	if n, err := usage(t.Context(), newTurns(), dir, 1<<40); !errors.Is(err, errTooDeep) || n.bytes < 2<<20 {
		t.Errorf("%d bytes, %v", n, err)
	}
}

func mkfifo(path string) error { return unix.Mkfifo(path, 0o600) }

// Usage measured for limits is reported, and nothing is measured for the report alone. A pod
// without limits only has the figures of its own file systems.
func TestStorageIsTold(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		const mi = 1 << 20
		n := newNode(t)
		dir := t.TempDir()
		n.vol.Root = filepath.Join(dir, "volumes")
		n.cfg.Written = func(string) (own, shared []string) { return []string{dir + "/layer"}, nil }
		n.start()
		defer func() { n.stop() }()
		volumes := []v1.Volume{
			{Name: "data", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}},
			{Name: "kept", VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}}}
		limited, free := simplePod("u1", v1.Container{Name: "app", Image: "hello:1"}), simplePod("u2", v1.Container{Name: "app", Image: "hello:1"})
		limited.Spec.Volumes, free.Spec.Volumes = volumes, volumes
		limited.Spec.Containers[0].Resources.Limits = v1.ResourceList{v1.ResourceEphemeralStorage: resource.MustParse("100Mi")}
		n.cluster.Put(limited)
		n.cluster.Put(free)
		time.Sleep(measureEvery / 2) // virtual time
		fill(t, 2*mi, n.vol.Root, "u1", "data", "f")
		fill(t, 3*mi, n.vol.Root, "u2", "data", "f")
		for _, uid := range []string{"u1", "u2"} {
			fill(t, 1, n.vol.Root, uid, "kept", "f")
		}
		fill(t, mi, dir, "layer", "f")
		time.Sleep(2 * measureEvery)
		virtual.Wait()
		got := n.set.Storage()
		p := got["u1"]
		if len(p.Volumes) != 2 || p.At.IsZero() || p.Used < 3*mi || p.Volumes[0].Used < 2*mi || p.Volumes[0].FileSystem != nil || p.Containers["app"].Layer < mi {
			t.Errorf("with limits: %+v", p)
		}
		if p = got["u2"]; !p.At.IsZero() || p.Used != 0 || len(p.Volumes) != 1 || p.Volumes[0].Claim != "c" || p.Volumes[0].FileSystem == nil ||
			p.Volumes[0].FileSystem.Capacity == 0 || p.Volumes[0].At.IsZero() {
			t.Errorf("without limits: %+v", p)
		}
	})
}

// A file system that hangs delays measurements for a bounded time, and blocks at most one of them.
func TestHangingFileSystems(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		var d disks
		var looks atomic.Int32
		hang := make(chan struct{})
		of := func(path string) (agent.Disk, error) {
			looks.Add(1)
			if path == "/hangs" {
				<-hang
			}
			return agent.Disk{Capacity: 7}, nil
		}
		if got := d.look([]string{"/a"}, of); got["/a"].disk.Capacity != 7 {
			t.Errorf("%v", got)
		}
		for range 3 {
			begin := time.Now()
			if got := d.look([]string{"/a", "/hangs"}, of); got["/a"].disk.Capacity != 7 || time.Since(begin) > diskPatience {
				t.Errorf("after %v: %v", time.Since(begin), got)
			}
		}
		if n := looks.Load(); n != 3 {
			t.Errorf("%d looks", n)
		}
		close(hang)
		virtual.Wait()
		if got := d.look([]string{"/a", "/hangs"}, of); got["/hangs"].disk.Capacity != 7 {
			t.Errorf("%v", got)
		}
	})
}
