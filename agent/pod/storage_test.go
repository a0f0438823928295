package pod

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
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

// What takes more space than its limit is evicted, with Kubernetes' words.
func TestStorageLimitsEvict(t *testing.T) {
	const mi = 1 << 20
	limit := func(q string) v1.ResourceRequirements {
		return v1.ResourceRequirements{Limits: v1.ResourceList{v1.ResourceEphemeralStorage: resource.MustParse(q)}}
	}
	for name, c := range map[string]struct {
		change func(p *v1.Pod)
		write  func(volumes, layer, shared, logs string)
		want   string // of the message; "" = it stays
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
		"another pod's": {func(p *v1.Pod) { p.Spec.Containers[0].Resources = limit("3Mi") },
			func(volumes, _, _, _ string) { fill(t, 9*mi, volumes, "..", "u2", "data", "f") }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
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
				synctest.Wait()
				if st := n.pod("u1").Status; st.Phase != v1.PodRunning {
					t.Fatalf("before anything was written: %+v", st)
				}
				c.write(filepath.Join(n.vol.Root, "u1"), dir+"/layer", dir+"/shared", logDirectory(n.cfg.Paths.Logs, p))
				time.Sleep(2*measureEvery + evictionGrace)
				synctest.Wait()
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
		return n
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
	// Links lead nowhere, a second name is no second file, a hole has no size, a FIFO stops nobody.
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

func mkfifo(path string) error { return unix.Mkfifo(path, 0o600) }
