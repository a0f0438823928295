package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/await"
)

func (b *bench) snap(id, from string) (*spec.Snapshot, error) {
	res, err := b.CreateSnapshot(b.t.Context(), &spec.CreateSnapshotRequest{Name: id, SourceVolumeId: from})
	return res.GetSnapshot(), err
}

func (b *bench) drop(id string) error {
	_, err := b.DeleteSnapshot(b.t.Context(), &spec.DeleteSnapshotRequest{SnapshotId: id})
	return err
}

func ofSnapshot(id string) *spec.VolumeContentSource {
	return &spec.VolumeContentSource{
		Type: &spec.VolumeContentSource_Snapshot{Snapshot: &spec.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
}

func ofVolume(id string) *spec.VolumeContentSource {
	return &spec.VolumeContentSource{
		Type: &spec.VolumeContentSource_Volume{Volume: &spec.VolumeContentSource_VolumeSource{VolumeId: id}}}
}

func (b *bench) createOf(id string, size int64, s *spec.VolumeContentSource) (*spec.Volume, error) {
	res, err := b.CreateVolume(b.t.Context(),
		&spec.CreateVolumeRequest{Name: id, VolumeCapabilities: []*spec.VolumeCapability{writer},
			CapacityRange: &spec.CapacityRange{RequiredBytes: size}, VolumeContentSource: s})
	return res.GetVolume(), err
}

// write writes a text to a file of a volume, which is staged for that.
func (b *bench) write(id, name, text string) {
	b.t.Helper()
	must(b.t, b.stage(id))
	must(b.t, os.WriteFile(filepath.Join(b.dir, "staging", name), []byte(text), 0o600))
	must(b.t, b.unstage(id))
}

func (b *bench) reads(id, name, want string) {
	b.t.Helper()
	must(b.t, b.stage(id))
	if text, err := os.ReadFile(filepath.Join(b.dir, "staging", name)); err != nil || string(text) != want {
		b.t.Errorf("%s of volume %s: %q, %v, want %q", name, id, text, err, want)
	}
	must(b.t, b.unstage(id))
}

// F110: a snapshot has the content of a volume while it is written to. Volumes, also larger ones,
// are created from it, and both are independent afterwards. A clone is created from a volume in
// use.
func TestSnapshotAndClone(t *testing.T) {
	b := newBench(t, 0)
	must(t, b.create("v", 20*mib))
	must(t, b.stage("v"))
	at := filepath.Join(b.dir, "staging")
	must(t, os.WriteFile(filepath.Join(at, "data"), []byte("then"), 0o600)) // only in the page cache
	for range 2 {
		s, err := b.snap("s", "v")
		if err != nil {
			t.Fatal(err)
		}
		if !s.ReadyToUse || s.SizeBytes != 20*mib || s.SourceVolumeId != "v" ||
			time.Since(s.CreationTime.AsTime()) > time.Hour {
			t.Errorf("the snapshot: %v", s)
		}
	}
	must(t, os.WriteFile(filepath.Join(at, "data"), []byte("now"), 0o600)) // it is not frozen
	if _, err := b.createOf("clone", 20*mib, ofVolume("v")); err != nil {
		t.Fatal(err)
	}
	must(t, b.unstage("v"))
	if _, err := b.createOf("small", 16*mib, ofSnapshot("s")); status.Code(err) != codes.OutOfRange {
		t.Errorf("a volume smaller than its snapshot: %v", err)
	}
	if v, err := b.createOf("large", 40*mib, ofSnapshot("s")); err != nil || v.CapacityBytes != 40*mib ||
		v.GetContentSource().GetSnapshot().GetSnapshotId() != "s" {
		t.Fatalf("a larger volume: %v, %v", v, err)
	}
	must(t, b.delete("v"))
	must(t, b.drop("s"))
	must(t, b.drop("s"))
	b.reads("clone", "data", "now")
	b.reads("large", "data", "then")
	must(t, b.stage("large"))
	must(t, os.WriteFile(filepath.Join(at, "more"), make([]byte, 24*mib), 0o600))
	must(t, b.unstage("large"))
	must(t, b.delete("clone"))
	must(t, b.delete("large"))
	nothingLeft(t, b.cfg.Root)
}

// An invalid or different source, and a lack of space, are refused with the name of the source.
func TestSnapshotRefusals(t *testing.T) {
	b := newBench(t, 60*mib)
	must(t, b.create("v", 20*mib))
	must(t, os.Mkdir(filepath.Join(b.cfg.Root, "folder"), 0o700))
	if _, err := b.snap("s", "v"); err != nil {
		t.Fatal(err)
	}
	is := func(what string, err error, want codes.Code, words string) {
		t.Helper()
		if status.Code(err) != want || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v, want %s and %q", what, err, want, words)
		}
	}
	_, err := b.snap("s2", "none")
	is("of a volume that is not there", err, codes.NotFound, "volume none does not exist on node w1")
	_, err = b.snap("s2", "folder")
	is("of a folder", err, codes.FailedPrecondition, "is a folder")
	_, err = b.snap("s", "folder")
	is("of another volume", err, codes.AlreadyExists, "is a snapshot of volume v")
	_, err = b.createOf("c", 20*mib, ofSnapshot("none"))
	is("a source that is not there", err, codes.NotFound,
		"snapshot none, the source of volume c, does not exist on node w1")
	_, err = b.createOf("v", 20*mib, ofSnapshot("s"))
	is("a volume made of something else", err, codes.AlreadyExists, "was created from another source")
	if _, err = b.createOf("c", 20*mib, ofSnapshot("s")); err != nil {
		t.Fatal(err)
	}
	is("a volume that was made of something", b.create("c", 20*mib), codes.AlreadyExists,
		"was created from another source")
	_, err = b.snap("s2", "v")
	is("a snapshot too many", err, codes.ResourceExhausted, "snapshot s2 wants 20 MiB, and node w1 has 0 MiB left")
	_, err = b.createOf("c2", 20*mib, ofVolume("c"))
	is("a clone too many", err, codes.ResourceExhausted, "volume c2 wants 20 MiB")
	res, err := b.ListSnapshots(t.Context(), &spec.ListSnapshotsRequest{})
	if err != nil || len(res.Entries) != 1 {
		t.Errorf("there are %v, %v", res, err)
	}
}

// After a driver was killed between any two steps, repeating the call completes a snapshot or a
// restore, and deleting it leaves nothing.
func TestSnapshotKilledBetweenSteps(t *testing.T) {
	half := func(b *bench, path string) {
		must(b.t, os.MkdirAll(filepath.Dir(path), 0o700))
		must(b.t, os.WriteFile(path, bytes.Repeat([]byte("half"), mib), 0o600))
	}
	begun := volumeRecord{Size: 20 * mib, SourceVolume: "v", Shared: true}
	restoring := volumeRecord{Size: 20 * mib, SourceSnapshot: "s", Shared: true}
	for name, state := range map[string]func(b *bench){
		"before anything": func(*bench) {},
		"record begun":    func(b *bench) { must(b.t, writeRecord(b.store.snapshotRecordFile("s"), begun)) },
		"half a copy": func(b *bench) {
			must(b.t, writeRecord(b.store.snapshotRecordFile("s"), begun))
			half(b, b.store.snapshotFile("s"))
		},
		"copied": func(b *bench) {
			must(b.t, writeRecord(b.store.snapshotRecordFile("s"), begun))
			_, err := b.copyVolume(b.t.Context(), "v", b.store.snapshotFile("s"))
			must(b.t, err)
		},
		"frozen": func(b *bench) {
			must(b.t, b.stage("v"))
			must(b.t, writeRecord(b.store.snapshotRecordFile("s"), begun))
			dir, err := os.Open(filepath.Join(b.dir, "staging"))
			must(b.t, err)
			defer dir.Close()
			var none int32
			must(b.t, ioctlPointer(dir, ioctlFreeze, &none))
		},
		"taken": func(b *bench) { _, err := b.snap("s", "v"); must(b.t, err) },
		"restore begun": func(b *bench) {
			_, err := b.snap("s", "v")
			must(b.t, errors.Join(err, b.store.writeVolume("c", restoring)))
		},
		"restored by half": func(b *bench) {
			_, err := b.snap("s", "v")
			must(b.t, errors.Join(err, b.store.writeVolume("c", restoring)))
			half(b, b.store.imageFile("c"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, 0)
			must(t, b.create("v", 20*mib))
			b.write("v", "data", "kept")
			state(b)
			b.again(0)
			must(t, b.thawAll())
			if name == "frozen" {
				wrote := make(chan error, 1)
				go func() { wrote <- os.WriteFile(filepath.Join(b.dir, "staging", "data"), []byte("kept"), 0o600) }()
				select {
				case err := <-wrote:
					must(t, err)
				case <-time.After(time.Minute):
					t.Fatal("the volume is frozen")
				}
				must(t, b.unstage("v"))
			}
			_, err := b.snap("s", "v")
			must(t, err)
			_, err = b.createOf("c", 20*mib, ofSnapshot("s"))
			must(t, err)
			b.reads("c", "data", "kept")
			if out, err := exec.Command("e2fsck", "-f", "-n", b.store.imageFile("c")).CombinedOutput(); err != nil {
				t.Errorf("the file system: %v\n%s", err, out)
			}
			b.again(0)
			must(t, errors.Join(b.drop("s"), b.delete("c"), b.delete("v")))
			nothingLeft(t, b.cfg.Root)
		})
	}
}

// A file system is thawed by its guard if the freezing process is killed, and by that process
// otherwise.
func TestGuardThaws(t *testing.T) {
	b := newBench(t, 0)
	must(t, b.create("v", 20*mib))
	must(t, b.stage("v"))
	at := filepath.Join(b.dir, "staging")
	dir, err := os.Open(at)
	must(t, err)
	defer dir.Close()
	in, out, err := os.Pipe()
	must(t, err)
	c := exec.Command("/proc/self/exe", GuardCommand)
	c.Stdin, c.ExtraFiles = in, []*os.File{dir}
	must(t, c.Start())
	var none int32
	must(t, ioctlPointer(dir, ioctlFreeze, &none))
	must(t, errors.Join(in.Close(), out.Close())) // like the exit of the driver
	must(t, c.Wait())
	if err := thawFileSystem(dir); !errors.Is(err, unix.EINVAL) {
		t.Errorf("the file system was frozen after its freezer's end (%v)", err)
	}
	// If it was thawed meanwhile, the copy is discarded.
	err = b.withFrozen(t.Context(), at, func(context.Context) error { return thawFileSystem(dir) })
	if err == nil || !strings.Contains(err.Error(), "did not stay frozen") {
		t.Errorf("a copy of what did not stay frozen: %v", err)
	}
	must(t, dir.Close())
	must(t, b.unstage("v"))
}

// counting writes increasing numbers to all files in turn until stop is called. It returns after
// the first numbers.
func counting(t *testing.T, files ...string) (stop func()) {
	count := func(file string, n int) {
		f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
		must(t, err)
		_, err = fmt.Fprintf(f, "%08d", n)
		must(t, errors.Join(err, f.Sync(), f.Close()))
	}
	enough, done, begun := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for n := 1; ; n++ {
			select {
			case <-enough:
				return
			default:
			}
			for _, f := range files {
				count(f, n)
			}
			if n == 3 {
				close(begun)
			}
		}
	}()
	<-begun
	return func() { close(enough); <-done }
}

// A copy has the content of one moment. If a program writes two files one after the other, the copy
// of the second is never newer than that of the first.
func TestSnapshotIsOfOneMoment(t *testing.T) {
	b := newBench(t, 0)
	must(t, b.create("v", 32*mib))
	must(t, b.stage("v"))
	at := filepath.Join(b.dir, "staging")
	stop := counting(t, filepath.Join(at, "first"), filepath.Join(at, "second"))
	for i := range 5 {
		_, err := b.snap(fmt.Sprint("s", i), "v")
		must(t, err)
	}
	stop()
	must(t, b.unstage("v"))
	for i := range 5 {
		id := fmt.Sprint("c", i)
		_, err := b.createOf(id, 32*mib, ofSnapshot(fmt.Sprint("s", i)))
		must(t, err)
		must(t, b.stage(id))
		var n [2]int
		for k, name := range []string{"first", "second"} {
			text, err := os.ReadFile(filepath.Join(at, name))
			must(t, err)
			_, err = fmt.Sscanf(string(text), "%d", &n[k])
			must(t, err)
		}
		if n[0] != n[1] && n[0] != n[1]+1 {
			t.Errorf("copy %d has first %d and second %d", i, n[0], n[1])
		}
		must(t, b.unstage(id))
	}
}

// Files become equal whatever holes they have; what is a hole in both stays a hole.
func TestAlike(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		dir := t.TempDir()
		var f [2]*os.File
		for i := range f {
			var err error
			f[i], err = os.Create(filepath.Join(dir, fmt.Sprint(i)))
			must(t, err)
			must(t, f[i].Truncate(16*mib+int64(r.IntN(5000))))
			for range r.IntN(6) {
				_, err := f[i].WriteAt(bytes.Repeat([]byte{byte(r.IntN(3))}, 1+r.IntN(3*mib)), int64(r.IntN(12*mib)))
				must(t, err)
			}
		}
		size, err := f[1].Seek(0, 2)
		must(t, err)
		must(t, f[0].Truncate(min(size, 10*mib)))
		must(t, copyDifferences(t.Context(), f[0], f[1]))
		a, err := os.ReadFile(f[0].Name())
		must(t, err)
		b, err := os.ReadFile(f[1].Name())
		must(t, err)
		if !bytes.Equal(a, b) {
			t.Error("they differ")
		}
		must(t, errors.Join(f[0].Close(), f[1].Close()))
	}
	empty := filepath.Join(t.TempDir(), "empty")
	must(t, os.WriteFile(empty, nil, 0o600))
	must(t, os.Truncate(empty, 1<<30))
	_, err := copyImage(t.Context(), empty, empty+"2", func(do func(context.Context) error) error {
		return do(t.Context())
	})
	must(t, err)
	var st unix.Stat_t
	must(t, unix.Stat(empty+"2", &st))
	if st.Size != 1<<30 || st.Blocks*512 > mib {
		t.Errorf("a copy of nothing has %d bytes and takes %d", st.Size, st.Blocks*512)
	}
}

// A call that ends before its copy does not stop it. A repeated call waits for the same copy.
func TestCopiesOutliveCalls(t *testing.T) {
	var j jobSet
	hold, runs := make(chan struct{}), 0
	do := func(context.Context) error { runs++; <-hold; return nil }
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if over, err := j.runShared(ctx, t.Context(), "x", do); over || err == nil {
		t.Errorf("a call that ended: %v, %v", over, err)
	}
	again := make(chan error, 1)
	go func() {
		over, err := j.runShared(t.Context(), t.Context(), "x", do)
		if err == nil && !over {
			err = errors.New("it is not over")
		}
		again <- err
	}()
	close(hold)
	must(t, <-again)
	await.Until(t.Context(), t, await.Patience, time.Millisecond, "the end of the job", func() error {
		j.mu.Lock()
		defer j.mu.Unlock()
		if len(j.byName) > 0 {
			return errors.New("it is remembered")
		}
		return nil
	})
	if runs > 2 {
		t.Errorf("it was done %d times", runs)
	}
}
