package image

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A disk that is mounted at the images folder stays mounted when the store stops, and the next
// store detects it.
func TestADiskOfImagesStaysMounted(t *testing.T) {
	needRoot(t)
	root := filepath.Join(t.TempDir(), "images")
	mountTmpfs(t, root)
	s, stop := openStore(t, Config{Root: root, Run: t.TempDir()})
	img := newTestImage(t, []entry{{name: "a", content: "low"}})
	if _, err := s.Import(testContext(t), newOCIArchive(t, map[string]v1.Image{"x.dev/a:v1": img}, nil)); err != nil {
		t.Fatal(err)
	}
	stop()
	if n := len(mountsAt(t, root)); n != 1 {
		t.Fatalf("%d mounts at %s after the store's end, want the disk alone", n, root)
	}
	s, stop = openStore(t, Config{Root: root, Run: t.TempDir()})
	if r, err := s.ListImages(testContext(t), &cri.ListImagesRequest{}); err != nil || len(r.Images) != 1 {
		t.Errorf("the next store knows of %v (%v), want the image on the disk", r.GetImages(), err)
	}
	stop()
}

// The store distinguishes its own mount from existing ones: the next store finds the mount of a
// killed store, and only that mount is removed at the end.
func TestSealTakesAwayItsOwnMountAlone(t *testing.T) {
	needRoot(t)
	for name, there := range map[string]func(t *testing.T, root string){
		"nothing": func(*testing.T, string) {},
		"a disk":  mountTmpfs,
		"another folder of its name": func(t *testing.T, root string) {
			bindMount(t, filepath.Join(filepath.Dir(root), "elsewhere", "images"), root)
		},
		"the folder of its name at the top of a disk": func(t *testing.T, root string) {
			disk := filepath.Join(filepath.Dir(root), "disk")
			mountTmpfs(t, disk)
			bindMount(t, filepath.Join(disk, "images"), root)
		},
		"its folder is on a disk": func(t *testing.T, root string) { mountTmpfs(t, filepath.Dir(root)) },
		"its folder is a link": func(t *testing.T, root string) {
			to := filepath.Join(filepath.Dir(root), "elsewhere")
			if err := os.Mkdir(to, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(to, root); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := filepath.Join(t.TempDir(), "lib", "images")
			if err := os.Mkdir(filepath.Dir(root), 0o755); err != nil {
				t.Fatal(err)
			}
			there(t, root)
			before := mountsAt(t, root)
			if _, err := mountStore(root); err != nil { // left by a killed store
				t.Fatal(err)
			}
			sealed := mountsAt(t, root)
			open, err := mountStore(root)
			if err != nil {
				t.Fatal(err)
			}
			if got := mountsAt(t, root); len(sealed) != len(before)+1 || !slices.Equal(got, sealed) {
				t.Errorf("mounts %v before, %v sealed, %v sealed once more; want one more, and the same",
					before, sealed, got)
			}
			var st unix.Statfs_t
			if err := unix.Statfs(root, &st); err != nil || st.Flags&unix.ST_NOSUID == 0 ||
				st.Flags&unix.ST_NODEV == 0 {
				t.Errorf("flags %#x, %v: programs gain rights there, or devices open", st.Flags, err)
			}
			if err := open(); err != nil {
				t.Error(err)
			}
			if got := mountsAt(t, root); !slices.Equal(got, before) {
				t.Errorf("mounts %v before, %v after", before, got)
			}
		})
	}
}

func mountTmpfs(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}

func bindMount(t *testing.T, from, to string) {
	t.Helper()
	for _, dir := range []string{from, to} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(to, unix.MNT_DETACH) })
}

// mountsAt returns the IDs of the mounts stacked at a folder.
func mountsAt(t *testing.T, dir string) []int {
	t.Helper()
	if to, err := filepath.EvalSymlinks(dir); err == nil {
		dir = to
	}
	all, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != dir, false })
	if err != nil {
		t.Fatal(err)
	}
	var ids []int
	for _, m := range all {
		ids = append(ids, m.ID)
	}
	return ids
}
