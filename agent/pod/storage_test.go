package pod

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"keelson.dev/keelson/agent/pod/diskusage"
	"keelson.dev/keelson/agent/pod/podfiles"
	"keelson.dev/keelson/internal/virtual"
)

func writeFile(t *testing.T, size int, path ...string) {
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
		"an emptyDir within its limit": {func(p *v1.Pod) {
			p.Spec.Volumes[0].EmptyDir.SizeLimit = new(resource.MustParse("2Mi"))
		},
			func(volumes, _, _, _ string) { writeFile(t, mi, volumes, "data", "file") }, ""},
		"an emptyDir beyond it": {func(p *v1.Pod) {
			p.Spec.Volumes[0].EmptyDir.SizeLimit = new(resource.MustParse("1Mi"))
		},
			func(volumes, _, _, _ string) { writeFile(t, 2*mi, volumes, "data", "deep", "down", "file") },
			`Usage of EmptyDir volume "data" exceeds the limit "1Mi". `},
		"a container's layer": {func(p *v1.Pod) { p.Spec.Containers[0].Resources = limit("1Mi") },
			func(_, layer, _, _ string) { writeFile(t, 2*mi, layer, "file") },
			`Pod ephemeral local storage usage exceeds the total limit of containers 1Mi. `},
		"its log": {func(p *v1.Pod) {
			p.Spec.Containers[0].Resources = limit("1Mi")
			p.Spec.Containers[1].Resources = limit("9Mi")
		},
			func(_, _, _, logs string) { writeFile(t, 2*mi, logs, "app", "0.log") },
			`Container app exceeded its local ephemeral storage limit "1Mi". `},
		"volumes and what containers share": {func(p *v1.Pod) { p.Spec.Containers[0].Resources = limit("3Mi") },
			func(volumes, _, shared, _ string) {
				writeFile(t, 2*mi, volumes, "data", "f")
				writeFile(t, 2*mi, shared, "resolv.conf")
			},
			`Pod ephemeral local storage usage exceeds the total limit of containers 3Mi. `},
		"folders without end": {func(p *v1.Pod) {
			p.Spec.Volumes[0].EmptyDir.SizeLimit = new(resource.MustParse("900Mi"))
		},
			func(volumes, _, _, _ string) {
				if err := os.MkdirAll(filepath.Join(volumes, "data", strings.Repeat("d/", diskusage.MaxDepth+1)),
					0o700); err != nil {
					t.Error(err)
				}
			},
			"Usage of local ephemeral storage cannot be compared with its limits: directories are nested more than " +
				"256 levels deep. "},
		"another pod's": {func(p *v1.Pod) { p.Spec.Containers[0].Resources = limit("3Mi") },
			func(volumes, _, _, _ string) { writeFile(t, 9*mi, volumes, "..", "u2", "data", "f") }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				n := newNode(t)
				dir := t.TempDir()
				n.vol.Root = filepath.Join(dir, "volumes")
				n.cfg.WrittenDirs = func(id string) (own, shared []string) {
					if id != n.rt.Running("u1", "app") {
						return nil, []string{dir + "/shared"}
					}
					return []string{dir + "/layer"}, []string{dir + "/shared"}
				}
				n.startAgent()
				defer func() { n.stop() }()
				p := simplePod("u1", v1.Container{Name: "app", Image: "hello:1"},
					v1.Container{Name: "other", Image: "hello:1"})
				p.Spec.Volumes = []v1.Volume{{Name: "data",
					VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}}
				c.change(p)
				n.cluster.Put(p)
				time.Sleep(2 * measureInterval) // virtual time
				virtual.Wait()
				if st := n.reportedPod("u1").Status; st.Phase != v1.PodRunning {
					t.Fatalf("before anything was written: %+v", st)
				}
				c.write(filepath.Join(n.vol.Root, "u1"), dir+"/layer", dir+"/shared",
					podfiles.LogDirectory(n.cfg.Paths.Logs, p))
				time.Sleep(2*measureInterval + evictionGrace)
				virtual.Wait()
				st := n.reportedPod("u1").Status
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

// Usage measured for limits is reported, and nothing is measured for the report alone. A pod
// without limits only has the figures of its own file systems.
func TestStorageIsTold(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		const mi = 1 << 20
		n := newNode(t)
		dir := t.TempDir()
		n.vol.Root = filepath.Join(dir, "volumes")
		n.cfg.WrittenDirs = func(string) (own, shared []string) { return []string{dir + "/layer"}, nil }
		n.startAgent()
		defer func() { n.stop() }()
		volumes := []v1.Volume{
			{Name: "data", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}},
			{Name: "kept",
				VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{
					ClaimName: "c"}}}}
		limited, free := simplePod("u1", v1.Container{Name: "app", Image: "hello:1"}),
			simplePod("u2", v1.Container{Name: "app", Image: "hello:1"})
		limited.Spec.Volumes, free.Spec.Volumes = volumes, volumes
		limited.Spec.Containers[0].Resources.Limits =
			v1.ResourceList{v1.ResourceEphemeralStorage: resource.MustParse("100Mi")}
		n.cluster.Put(limited)
		n.cluster.Put(free)
		time.Sleep(measureInterval / 2) // virtual time
		writeFile(t, 2*mi, n.vol.Root, "u1", "data", "f")
		writeFile(t, 3*mi, n.vol.Root, "u2", "data", "f")
		for _, uid := range []string{"u1", "u2"} {
			writeFile(t, 1, n.vol.Root, uid, "kept", "f")
		}
		writeFile(t, mi, dir, "layer", "f")
		time.Sleep(2 * measureInterval)
		virtual.Wait()
		got := n.set.Storage()
		p := got["u1"]
		if len(p.Volumes) != 2 || p.At.IsZero() || p.Used < 3*mi || p.Volumes[0].Used < 2*mi ||
			p.Volumes[0].FileSystem != nil || p.Containers["app"].Layer < mi {
			t.Errorf("with limits: %+v", p)
		}
		if p = got["u2"]; !p.At.IsZero() || p.Used != 0 || len(p.Volumes) != 1 || p.Volumes[0].Claim != "c" ||
			p.Volumes[0].FileSystem == nil ||
			p.Volumes[0].FileSystem.Capacity == 0 || p.Volumes[0].At.IsZero() {
			t.Errorf("without limits: %+v", p)
		}
	})
}
