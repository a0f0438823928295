package lossy

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if path := os.Getenv("LOSSY_BOLT"); path != "" {
		os.Exit(boltChild(path))
	}
	os.Exit(m.Run())
}

// newDisk makes a disk, or skips the test where there can be none.
func newDisk(t testing.TB) *Disk {
	t.Helper()
	if err := Supported(); err != nil {
		t.Skipf("no lossy disk here: %v", err)
	}
	d, err := New(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// runScript runs lines such as "write f 0 abc" below root. Files are opened for each line.
func runScript(t testing.TB, root, lines string) {
	t.Helper()
	for line := range strings.SplitSeq(lines, ";") {
		w := strings.Fields(line)
		at := func(n int) string { return filepath.Join(root, w[n]) }
		var err error
		switch w[0] {
		case "write": // file text: the whole file is rewritten
			err = os.WriteFile(at(1), []byte(w[2]), 0o600)
		case "patch": // file offset text
			err = withFile(at(1), func(f *os.File) error {
				var offset int64
				fmt.Sscan(w[2], &offset)
				_, err := f.WriteAt([]byte(w[3]), offset)
				return err
			})
		case "truncate":
			var size int64
			fmt.Sscan(w[2], &size)
			err = os.Truncate(at(1), size)
		case "sync":
			err = withFile(at(1), (*os.File).Sync)
		case "datasync":
			err = withFile(at(1), func(f *os.File) error { return unix.Fdatasync(int(f.Fd())) })
		case "mkdir":
			err = os.Mkdir(at(1), 0o700)
		case "rename":
			err = os.Rename(at(1), at(2))
		case "remove":
			err = os.RemoveAll(at(1))
		default:
			err = errors.New("no such step")
		}
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
	}
}

func withFile(path string, use func(*os.File) error) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, syscall.EISDIR) {
		f, err = os.Open(path)
	}
	if err != nil {
		return err
	}
	return errors.Join(use(f), f.Close())
}

// listTree returns the content of the tree below root, as "f=abc d/ d/g=".
func listTree(t testing.TB, root string) string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root+"/", func(path string, e fs.DirEntry, err error) error {
		name, _ := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case name == ".":
		case e.IsDir():
			out = append(out, name+"/")
		default:
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			out = append(out, name+"="+strings.ReplaceAll(string(b), "\x00", "0"))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(out, " ")
}

// The content after a power cut, depending on the synced changes.
func TestWhatIsLeft(t *testing.T) {
	for _, c := range []struct {
		name, script string
		lost         string // neither data nor entries
		data         string // data without entries
		entries      string // entries without data
	}{
		{"new file, nothing synced", "write f abc", "", "", "f="},
		{"new file, file synced only", "write f abc; sync f", "", "", "f=abc"},
		{"new file, folder synced only", "write f abc; sync .", "f=", "f=abc", "f="},
		{"new file, both synced", "write f abc; sync f; sync .", "f=abc", "f=abc", "f=abc"},
		{"fdatasync brings data and length", "write f abc; datasync f; sync .", "f=abc", "f=abc", "f=abc"},
		{"overwritten", "write f abc; sync f; sync .; patch f 1 X", "f=abc", "f=aXc", "f=abc"},
		{"overwritten and synced", "write f abc; sync f; sync .; patch f 1 X; sync f", "f=aXc", "f=aXc", "f=aXc"},
		{"appended", "write f abc; sync f; sync .; patch f 3 def", "f=abc", "f=abcdef", "f=abc"},
		{"a hole reads as zeros", "write f a; patch f 3 b; sync f; sync .", "f=a00b", "f=a00b", "f=a00b"},
		{"truncated", "write f abcdef; sync f; sync .; truncate f 2", "f=abcdef", "f=ab", "f=abcdef"},
		{"truncated and lengthened", "write f abcdef; sync f; sync .; truncate f 2; truncate f 4; sync f", "f=ab00",
			"f=ab00", "f=ab00"},
		{"rewritten without a sync", "write f abc; sync f; sync .; write f de", "f=abc", "f=de", "f=abc"},
		{"removed", "write f abc; sync f; sync .; remove f", "f=abc", "f=abc", ""},
		{"removed and synced", "write f abc; sync f; sync .; remove f; sync .", "", "", ""},
		{"renamed", "write f abc; sync f; sync .; rename f g", "f=abc", "f=abc", "g=abc"},
		{"renamed and synced", "write f abc; sync f; sync .; rename f g; sync .", "g=abc", "g=abc", "g=abc"},
		{"replaced by rename, all synced", "write f old; sync f; sync .; write g new; sync g; rename g f; sync .",
			"f=new", "f=new", "f=new"},
		{"replaced by rename, folder not synced", "write f old; sync f; sync .; write g new; sync g; rename g f",
			"f=old", "f=old", "f=new"},
		{"replaced by rename, file not synced", "write f old; sync f; sync .; write g new; rename g f; sync .", "f=",
			"f=new", "f="},
		{"folder made, not synced in its parent", "mkdir d; write d/f abc; sync d/f; sync d", "", "", "d/ d/f=abc"},
		{"folder made and synced in its parent", "mkdir d; sync .; write d/f abc; sync d/f", "d/", "d/", "d/ d/f=abc"},
		{"folder, all synced", "mkdir d; write d/f abc; sync d/f; sync d; sync .", "d/ d/f=abc",
			"d/ d/f=abc", "d/ d/f=abc"},
		{"folder renamed with what is in it", "mkdir d; write d/f abc; sync d/f; sync d; rename d e; sync .",
			"e/ e/f=abc", "e/ e/f=abc", "e/ e/f=abc"},
		{"folder renamed, itself not synced", "mkdir d; write d/f abc; sync d/f; rename d e; sync .", "e/",
			"e/", "e/ e/f=abc"},
		{"moved between folders, target synced", "mkdir d; sync .; write f abc; sync f; sync .; rename f d/f; sync d",
			"d/ d/f=abc", "d/ d/f=abc", "d/ d/f=abc"},
		{"moved between folders, not synced", "mkdir d; sync .; write f abc; sync f; sync .; rename f d/f", "d/ f=abc",
			"d/ f=abc", "d/ d/f=abc"},
		{"moved over a new file of the other folder",
			"mkdir d; sync .; write f abc; sync f; sync .; write d/f x; rename f d/f; sync .; sync d", "d/ d/f=abc",
			"d/ d/f=abc", "d/ d/f=abc"},
		{"folder removed", "mkdir d; write d/f abc; sync d/f; sync d; sync .; remove d", "d/ d/f=abc",
			"d/ d/f=abc", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDisk(t)
			for _, after := range []struct {
				loss Loss
				want string
			}{{Loss{}, c.lost}, {Loss{Data: Kept}, c.data}, {Loss{Entries: Kept}, c.entries}} {
				runScript(t, d.Path(), c.script)
				whole := listTree(t, d.Path())
				if err := d.Crash(after.loss); err != nil {
					t.Fatal(err)
				}
				if got := listTree(t, d.Path()); got != after.want {
					t.Errorf("%s: left %q, want %q", after.loss, got, after.want)
				}
				if got := d.Unsynced(); len(got) != 0 {
					t.Errorf("%s: %v is not synced after it", after.loss, got)
				}
				runScript(t, d.Path(), "mkdir z; remove z")
				for _, left := range strings.Fields(listTree(t, d.Path())) {
					name, _, _ := strings.Cut(left, "=")
					runScript(t, d.Path(), "remove "+name)
				}
				runScript(t, d.Path(), c.script)
				if err := d.Crash(Loss{Data: Kept, Entries: Kept}); err != nil {
					t.Fatal(err)
				}
				if got := listTree(t, d.Path()); got != whole {
					t.Errorf("with all kept: left %q, want %q", got, whole)
				}
				for _, left := range strings.Fields(whole) {
					name, _, _ := strings.Cut(left, "=")
					runScript(t, d.Path(), "remove "+name)
				}
				runScript(t, d.Path(), "sync .")
			}
		})
	}
}

func TestUnsynced(t *testing.T) {
	d := newDisk(t)
	runScript(t, d.Path(), "mkdir d; write d/f abc; write g x; sync g")
	if got, want := d.Unsynced(), []string{"/", "/d", "/d/f"}; !slices.Equal(got, want) {
		t.Errorf("not synced: %v, want %v", got, want)
	}
	runScript(t, d.Path(), "sync d; sync d/f; sync .")
	if got := d.Unsynced(); len(got) != 0 {
		t.Errorf("not synced: %v, want nothing", got)
	}
}

// In a torn file every block has its old content or a content that was written at some time, and
// synced data is complete.
func TestTornBlocks(t *testing.T) {
	const blocks, block = 64, 512
	d := newDisk(t)
	name := filepath.Join(d.Path(), "f")
	page := func(b byte) []byte { return bytes.Repeat([]byte{b}, blocks*block) }
	seen := make(map[byte]int)
	for seed := uint64(1); seed <= 12; seed++ {
		if err := os.WriteFile(name, page('a'), 0o600); err != nil {
			t.Fatal(err)
		}
		runScript(t, d.Path(), "sync f; sync .")
		err := withFile(name, func(f *os.File) error {
			_, one := f.WriteAt(page('b'), 0)
			_, two := f.WriteAt(page('c'), 0)
			return errors.Join(one, two)
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Crash(Loss{Data: Torn, Seed: seed}); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(name)
		if err != nil || len(got) != blocks*block {
			t.Fatalf("%d bytes, error %v", len(got), err)
		}
		for piece := range slices.Chunk(got, block) {
			if bytes.Count(piece, piece[:1]) != block {
				t.Fatalf("seed %d: a block is torn in itself: %q", seed, piece)
			}
			seen[piece[0]]++
		}
	}
	if seen['a'] == 0 || seen['b'] == 0 || seen['c'] == 0 || len(seen) != 3 {
		t.Errorf("blocks seen: %v, want some of a, b and c", seen)
	}
}

// The same seed loses the same.
func TestSeedRepeats(t *testing.T) {
	d := newDisk(t)
	var first [][]byte
	for round := range 2 {
		for seed := range uint64(8) {
			if err := os.WriteFile(filepath.Join(d.Path(), "f"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			runScript(t, d.Path(), "sync f; sync .")
			runScript(t, d.Path(), "patch f 5000 abc; patch f 100 def; truncate f 9000; patch f 0 ghi")
			if err := d.Crash(Loss{Data: Torn, Entries: Torn, Seed: seed}); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(filepath.Join(d.Path(), "f"))
			if err != nil {
				t.Fatal(err)
			}
			if round == 0 {
				first = append(first, got)
			} else if !bytes.Equal(first[seed], got) {
				t.Errorf("seed %d lost something else the second time", seed)
			}
		}
	}
}

// The entries of one folder get to the platter in order.
func TestTornEntriesAreAPrefix(t *testing.T) {
	d := newDisk(t)
	lengths := make(map[int]bool)
	for seed := range uint64(24) {
		runScript(t, d.Path(), "write a 1; write b 1; write c 1; write d 1; rename a e")
		if err := d.Crash(Loss{Entries: Torn, Data: Kept, Seed: seed}); err != nil {
			t.Fatal(err)
		}
		got := listTree(t, d.Path())
		want := []string{"", "a=1", "a=1 b=1", "a=1 b=1 c=1", "a=1 b=1 c=1 d=1", "b=1 c=1 d=1 e=1"}
		n := slices.Index(want, got)
		if n < 0 {
			t.Fatalf("seed %d: left %q, which is no beginning of what was done", seed, got)
		}
		lengths[n] = true
		for _, name := range []string{"a", "b", "c", "d", "e"} {
			os.Remove(filepath.Join(d.Path(), name))
		}
		runScript(t, d.Path(), "sync .")
	}
	if len(lengths) < 3 {
		t.Errorf("only %d different endings in 24 power cuts", len(lengths))
	}
}

// A disk that is in use cannot crash: its files would be those of two disks.
func TestCrashInUse(t *testing.T) {
	d := newDisk(t)
	d.patience = 50 * time.Millisecond
	f, err := os.Create(filepath.Join(d.Path(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Crash(Loss{}); err == nil {
		t.Error("a disk crashed under an open file")
	}
	f.Close()
	d.patience = patience
	if err := d.Crash(Loss{}); err != nil {
		t.Errorf("after closing it: %v", err)
	}
}

// Nothing of a disk is to be seen in the table of mounts, so nothing can stay behind.
func TestMountedNowhere(t *testing.T) {
	d := newDisk(t)
	runScript(t, d.Path(), "write f abc")
	var st unix.Stat_t
	if err := unix.Stat(d.Path(), &st); err != nil {
		t.Fatal(err)
	}
	// Others on this machine mount and unmount meanwhile.
	if own := fmt.Sprintf(" %d:%d ", unix.Major(st.Dev), unix.Minor(st.Dev)); strings.Contains(readMounts(t), own) {
		t.Errorf("its device%sis mounted:\n%s", own, readMounts(t))
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(d.Path()); !os.IsNotExist(err) {
		t.Errorf("the link is still there: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Errorf("closing again: %v", err)
	}
}

func readMounts(t *testing.T) string {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// bbolt maps its file and writes with pwrite: commits exist after every power cut, in another
// process each time.
func TestMappedFile(t *testing.T) {
	d := newDisk(t)
	db := filepath.Join(d.Path(), "bolt.db")
	// The file must exist durably: bbolt does not sync the folder.
	runScript(t, d.Path(), "write bolt.db x; truncate bolt.db 0; sync bolt.db; sync .")
	var last int
	for round, loss := range slices.Concat(Losses(1), Losses(2)) {
		if round > 0 {
			d.CutAt(uint64(20 + 7*round))
		}
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), "LOSSY_BOLT="+db, fmt.Sprintf("LOSSY_FROM=%d", last))
		var complaint strings.Builder
		child.Stderr = &complaint
		out, err := child.Output()
		if round == 0 && err != nil || !bytes.HasPrefix(out, []byte("opened")) {
			t.Fatalf("round %d: %v: %s%s", round, err, out, complaint.String())
		}
		committed := last
		for line := range strings.Lines(string(out)) {
			if strings.HasPrefix(line, "lost") {
				t.Fatalf("after round %d: %s", round, line)
			}
			fmt.Sscanf(line, "committed %d", &committed)
		}
		if committed == last && round == 0 {
			t.Fatalf("nothing committed: %s", out)
		}
		last = committed
		if err := d.Crash(loss); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d commits", last)
}

// boltChild checks the database for the commits up to LOSSY_FROM, and adds commits until the power
// is cut.
func boltChild(path string) int {
	var from int
	fmt.Sscan(os.Getenv("LOSSY_FROM"), &from)
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("opened")
	bucket := []byte("b")
	key := func(n int) []byte { return fmt.Appendf(nil, "%08d", n) }
	err = db.View(func(tx *bbolt.Tx) error {
		for n := 1; n <= from; n++ {
			if b := tx.Bucket(bucket); b == nil || len(b.Get(key(n))) != 3000 {
				fmt.Printf("lost %d of %d\n", n, from)
				return errors.New("lost")
			}
		}
		return nil
	})
	for n := from + 1; err == nil && n <= from+30; n++ {
		err = db.Update(func(tx *bbolt.Tx) error {
			b, err := tx.CreateBucketIfNotExists(bucket)
			if err != nil {
				return err
			}
			return b.Put(key(n), make([]byte, 3000))
		})
		if err == nil {
			fmt.Printf("committed %d\n", n)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func BenchmarkAppendAndSync(b *testing.B) {
	d := newDisk(b)
	f, err := os.Create(filepath.Join(d.Path(), "f"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	block := make([]byte, 4096)
	for n := int64(0); b.Loop(); n++ {
		if _, err := f.WriteAt(block, n%1024*4096); err != nil {
			b.Fatal(err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			b.Fatal(err)
		}
	}
}
