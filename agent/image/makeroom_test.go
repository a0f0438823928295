package image

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/internal/reservedspace"
	"keelson.dev/keelson/internal/virtual"
)

// onSmallDisk runs a store on a disk of 8 MiB, of which so many bytes have to stay free.
func onSmallDisk(t *testing.T, keep int64, cfg Config) (*Store, func()) {
	t.Helper()
	needRoot(t)
	if cfg.Root == "" {
		cfg.Root = filepath.Join(t.TempDir(), "images")
		tmpfs(t, cfg.Root)
	}
	cfg.Floor, cfg.Limits.Free = reservedspace.Bytes(keep), reservedspace.Bytes(keep/2)
	return open(t, cfg)
}

// filler is a layer's content of so many bytes that nothing else has.
func filler(name string, size int) []entry {
	return []entry{{name: name, content: strings.Repeat(name[:1], size)}}
}

func freeOn(t *testing.T, s *Store) int64 {
	t.Helper()
	fs, err := s.fileSystem()
	if err != nil {
		t.Fatal(err)
	}
	return fs.free.bytes
}

// podsWrite takes room away on the disk of a store that has begun.
func podsWrite(t *testing.T, s *Store, size int) {
	t.Helper()
	if err := os.WriteFile(s.path("tmp/pods"), make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
}

// present lists the names of images that are there, tags only.
func present(t *testing.T, s *Store) (tags []string) {
	t.Helper()
	r, err := s.ListImages(ctx(t), &cri.ListImagesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, im := range r.Images {
		for _, tag := range im.RepoTags {
			tags = append(tags, filepath.Base(tag))
		}
	}
	slices.Sort(tags)
	return tags
}

// On a disk that is short the images go that nothing uses, so that a pull works that did not; what containers stand on
// and pods name stays. F106
func TestRoomIsMade(t *testing.T) {
	reg := newRegistry(t)
	s, _ := onSmallDisk(t, 2<<20, Config{Insecure: []string{reg.host}})
	for _, n := range []string{"used", "named", "old", "older"} {
		reg.push(t, n+":v1", testImage(t, filler(n, 3<<19)))
		if _, err := pull(t, s, reg.host+"/"+n+":v1", nil); err != nil {
			t.Fatal(err)
		}
	}
	reg.push(t, "new:v1", testImage(t, filler("z", 2<<20)))
	if _, err := pull(t, s, reg.host+"/new:v1", nil); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("a pull onto a full disk: %v", err)
	}
	if _, err := s.PrepareRootFS(ctx(t), "c1", reg.host+"/used:v1"); err != nil {
		t.Fatal(err)
	}
	if done, err := s.MakeRoom(ctx(t), nil); err != nil || done.Images != 0 || !done.Short {
		t.Errorf("right after the pulls: %+v, %v; they are about to be used", done, err)
	}
	s.now = func() time.Time { return time.Now().Add(time.Hour) }
	done, err := s.MakeRoom(ctx(t), []string{reg.host + "/named:v1"})
	if err != nil || done.Images != 2 || done.Bytes < 3<<20 || done.Short {
		t.Errorf("%+v, %v", done, err)
	}
	if got := present(t, s); !slices.Equal(got, []string{"named:v1", "used:v1"}) {
		t.Errorf("%v are left", got)
	}
	if free := freeOn(t, s); free < 4<<20 {
		t.Errorf("%d bytes are free", free)
	}
	if _, err := pull(t, s, reg.host+"/new:v1", nil); err != nil {
		t.Error(err)
	}
}

// On a short disk an image goes with the last container that stood on it, though that was there until just now; one that
// was asked for since stays. F106 F95
func TestImagesGoWithTheirContainers(t *testing.T) {
	reg := newRegistry(t)
	s, _ := onSmallDisk(t, 2<<20, Config{Insecure: []string{reg.host}})
	for _, n := range []string{"ended", "asked"} {
		reg.push(t, n+":v1", testImage(t, filler(n, 2<<20)))
		if _, err := pull(t, s, reg.host+"/"+n+":v1", nil); err != nil {
			t.Fatal(err)
		}
		if _, err := s.PrepareRootFS(ctx(t), n, reg.host+"/"+n+":v1"); err != nil {
			t.Fatal(err)
		}
	}
	podsWrite(t, s, 3<<19)
	began := time.Now()
	s.now = func() time.Time { return began.Add(time.Hour) }
	if done, err := s.MakeRoom(ctx(t), nil); err != nil || done.Images != 0 {
		t.Fatalf("while containers stand on them: %+v, %v", done, err)
	}
	if _, err := s.ImageStatus(ctx(t), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: reg.host + "/asked:v1"}}); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"ended", "asked"} {
		if err := s.RemoveRootFS(ctx(t), n); err != nil {
			t.Fatal(err)
		}
	}
	if done, err := s.MakeRoom(ctx(t), nil); err != nil || done.Images != 1 {
		t.Errorf("%+v, %v", done, err)
	}
	if got := present(t, s); !slices.Equal(got, []string{"asked:v1"}) {
		t.Errorf("%v are left", got)
	}
}

// What is being deleted may be room enough: no image goes before that has gone, unless it takes for ever. F106 F95
func TestRoomWaitsForWhatGoes(t *testing.T) {
	needRoot(t)
	file := ociArchive(t, map[string]v1.Image{"x.dev/a:v1": testImage(t, filler("a", 1<<20))}, nil)
	virtual.Test(t, func(t *testing.T) {
		s, _ := onSmallDisk(t, 2<<20, Config{})
		if _, err := s.Import(ctx(t), file); err != nil {
			t.Fatal(err)
		}
		for _, goes := range []bool{true, false} {
			podsWrite(t, s, 11<<19)
			time.Sleep(time.Hour)
			type answer struct {
				Removed
				err error
			}
			end, got := s.deleting.begin(), make(chan answer, 1)
			go func() {
				done, err := s.MakeRoom(ctx(t), nil)
				got <- answer{done, err}
			}()
			time.Sleep(deletingPatience - time.Second)
			virtual.Wait()
			if len(got) > 0 {
				t.Fatalf("%+v: it does not wait", <-got)
			}
			if goes {
				if err := os.Remove(s.path("tmp/pods")); err != nil {
					t.Fatal(err)
				}
				end()
			}
			if a := <-got; a.err != nil || (a.Images == 0) != goes {
				t.Errorf("it goes: %v; %+v, %v", goes, a.Removed, a.err)
			}
		}
	})
}

// An image stays whose last container went while the room was looked at: what went with that may be enough. F106 F95
func TestAnImageOutlivesItsContainerByALook(t *testing.T) {
	reg := newRegistry(t)
	s, _ := onSmallDisk(t, 2<<20, Config{Insecure: []string{reg.host}})
	reg.push(t, "a:v1", testImage(t, filler("a", 1<<20)))
	if _, err := pull(t, s, reg.host+"/a:v1", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := s.PrepareRootFS(ctx(t), "c", reg.host+"/a:v1"); err != nil {
		t.Fatal(err)
	}
	s.now = func() time.Time { return time.Now().Add(time.Hour) }
	stood := s.stoodOn()
	if err := s.RemoveRootFS(ctx(t), "c"); err != nil {
		t.Fatal(err)
	}
	for want, stood := range []map[string]bool{stood, s.stoodOn()} {
		if done, err := s.removeUnused(nil, stood, room{bytes: 1}); err != nil || done.Images != want {
			t.Errorf("%+v, %v; want %d", done, err, want)
		}
	}
}

// Without need nothing goes, however long it was not used. F106
func TestNoRoomIsMadeWithoutNeed(t *testing.T) {
	reg := newRegistry(t)
	s, _ := onSmallDisk(t, 1<<20, Config{Insecure: []string{reg.host}})
	reg.push(t, "a:v1", testImage(t, filler("a", 1<<20)))
	if _, err := pull(t, s, reg.host+"/a:v1", nil); err != nil {
		t.Fatal(err)
	}
	s.now = func() time.Time { return time.Now().Add(1000 * time.Hour) }
	if done, err := s.MakeRoom(ctx(t), nil); err != nil || done != (Removed{}) {
		t.Errorf("%+v, %v", done, err)
	}
	if got := present(t, s); len(got) != 1 {
		t.Errorf("%v are left", got)
	}
}

// The last use of images outlives the agent: one that was pulled first and used last stays the longest. F106
func TestTheLastUseIsKept(t *testing.T) {
	reg := newRegistry(t)
	s, stop := onSmallDisk(t, 2<<20, Config{Insecure: []string{reg.host}})
	began := time.Now()
	for i, n := range []string{"first", "second", "third"} {
		s.now = func() time.Time { return began.Add(time.Duration(i-10) * time.Hour) }
		reg.push(t, n+":v1", testImage(t, filler(n, 3<<19)))
		if _, err := pull(t, s, reg.host+"/"+n+":v1", nil); err != nil {
			t.Fatal(err)
		}
	}
	s.now = func() time.Time { return began.Add(-time.Hour) }
	if _, err := s.ImageStatus(ctx(t), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: reg.host + "/first:v1"}}); err != nil {
		t.Fatal(err)
	}
	// A tag that moves on is no use of the image that had it.
	s.now = func() time.Time { return began.Add(-2 * time.Hour) }
	reg.push(t, "second:v1", testImage(t, []entry{{name: "x", content: "x"}}))
	if _, err := pull(t, s, reg.host+"/second:v1", nil); err != nil {
		t.Fatal(err)
	}
	stop()
	s, _ = onSmallDisk(t, 2<<20, Config{Root: s.cfg.Root})
	if got := present(t, s); len(got) != 3 {
		t.Fatalf("after a restart: %v", got)
	}
	podsWrite(t, s, 1<<19)
	if done, err := s.MakeRoom(ctx(t), nil); err != nil || done.Images != 1 {
		t.Errorf("%+v, %v; want the one to go that was used nine hours ago", done, err)
	}
	if got := present(t, s); !slices.Equal(got, []string{"first:v1", "second:v1", "third:v1"}) {
		t.Errorf("%v are left", got)
	}
	var idle []time.Duration
	for _, im := range s.images {
		idle = append(idle, began.Sub(im.used).Round(time.Hour))
	}
	if slices.Sort(idle); !slices.Equal(idle, []time.Duration{time.Hour, 2 * time.Hour, 8 * time.Hour}) {
		t.Errorf("unused for %v", idle)
	}
}

// An image stays whose archive the next start would import again; once the archive is gone it goes as any other. F106
func TestImagesOfArchivesStay(t *testing.T) {
	archives := t.TempDir()
	file := filepath.Join(archives, "a.tar")
	if err := os.Rename(ociArchive(t, map[string]v1.Image{"x.dev/a:v1": testImage(t, filler("a", 1<<20))}, nil), file); err != nil {
		t.Fatal(err)
	}
	s, _ := onSmallDisk(t, 2<<20, Config{Archives: archives})
	if got := present(t, s); len(got) != 1 {
		t.Fatalf("imported: %v", got)
	}
	podsWrite(t, s, 9<<19)
	s.now = func() time.Time { return time.Now().Add(time.Hour) }
	if done, err := s.MakeRoom(ctx(t), nil); err != nil || done.Images != 0 {
		t.Errorf("with its archive: %+v, %v", done, err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if done, err := s.MakeRoom(ctx(t), nil); err != nil || done.Images != 1 {
		t.Errorf("without: %+v, %v", done, err)
	}
}

// A pull that finds a layer of an old image takes it over: when that image goes before the pull is through, the layer
// stays, and the new image is whole. F106
func TestRoomIsMadeDuringAPull(t *testing.T) {
	reg := newRegistry(t)
	slow, reached, let := "", make(chan struct{}, 1), make(chan struct{})
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if slow != "" && strings.HasSuffix(q.URL.Path, slow) {
			reached <- struct{}{}
			<-let
		}
		q.URL.Scheme, q.URL.Host, q.RequestURI = "http", reg.host, ""
		r, err := http.DefaultTransport.RoundTrip(q)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer r.Body.Close()
		for k, v := range r.Header {
			w.Header()[k] = v
		}
		w.WriteHeader(r.StatusCode)
		_, _ = io.Copy(w, r.Body)
	}))
	t.Cleanup(front.Close)
	host := strings.TrimPrefix(front.URL, "http://")
	shared, other := filler("s", 2<<20), filler("o", 2<<20)
	fresh := testImage(t, shared, filler("f", 1000))
	reg.push(t, "old:v1", testImage(t, shared))
	reg.push(t, "other:v1", testImage(t, other))
	reg.push(t, "new:v1", fresh)
	layers, err := fresh.Layers()
	if err != nil {
		t.Fatal(err)
	}
	d, err := layers[1].Digest()
	if err != nil {
		t.Fatal(err)
	}
	slow = d.String()
	s, _ := onSmallDisk(t, 3<<20, Config{Insecure: []string{host}})
	for _, n := range []string{"old", "other"} {
		if _, err := pull(t, s, host+"/"+n+":v1", nil); err != nil {
			t.Fatal(err)
		}
	}
	s.now = func() time.Time { return time.Now().Add(time.Hour) }
	pulled := make(chan error, 1)
	go func() {
		_, err := pull(t, s, host+"/new:v1", nil)
		pulled <- err
	}()
	<-reached
	if done, err := s.MakeRoom(ctx(t), nil); err != nil || done.Images != 2 || done.Bytes >= 3<<20 {
		t.Errorf("during the pull: %+v, %v; want both images gone and one layer", done, err)
	}
	close(let)
	if err := <-pulled; err != nil {
		t.Fatal(err)
	}
	fs, err := s.PrepareRootFS(ctx(t), "c1", host+"/new:v1")
	if err != nil {
		t.Fatal(err)
	}
	for i, file := range []string{"f", "s"} {
		if _, err := os.Stat(filepath.Join(fs.Lower[i], file)); err != nil {
			t.Error(err)
		}
	}
	if done, err := s.MakeRoom(ctx(t), nil); err != nil || done.Images != 0 {
		t.Errorf("after the pull: %+v, %v", done, err)
	}
}

// What a pull is about to use stays, its record while that is written too; the rest goes. F106
func TestLayersOfPullsStay(t *testing.T) {
	s, _ := open(t, Config{})
	present(t, s) // it has begun
	for _, name := range []string{"aa.json", "aa.json.new", "bb.json", "bb.json.new"} {
		if err := os.WriteFile(s.path("layers", name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.mu.Lock()
	s.busy["aa"] = 1
	err := s.collect()
	s.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(s.path("layers"))
	if err != nil || len(entries) != 2 || entries[0].Name() != "aa.json" || entries[1].Name() != "aa.json.new" {
		t.Errorf("there are %v, error %v", entries, err)
	}
}

// Whoever asked for an image, as pods do before they make a container, finds it there although room is being made all
// the time. F106
func TestRoomIsMadeWhileContainersStart(t *testing.T) {
	reg := newRegistry(t)
	s, _ := onSmallDisk(t, 4<<20, Config{Insecure: []string{reg.host}})
	name := reg.host + "/a:v1"
	reg.push(t, "a:v1", testImage(t, filler("a", 3<<19)))
	present(t, s)
	podsWrite(t, s, 2<<20)
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			if _, err := s.MakeRoom(ctx(t), nil); err != nil {
				ended <- err
				return
			}
		}
	}()
	for i := range 20 {
		id, err := pull(t, s, name, nil)
		if err == nil {
			_, err = s.Config(ctx(t), id)
		}
		container := fmt.Sprint("c", i)
		if err == nil {
			_, err = s.PrepareRootFS(ctx(t), container, id)
		}
		if err == nil {
			err = s.RemoveRootFS(ctx(t), container)
		}
		if err != nil {
			t.Fatal(err)
		}
		s.mu.Lock() // an hour goes by, in which nobody uses it
		for _, im := range s.images {
			im.used = im.used.Add(-time.Hour)
		}
		s.mu.Unlock()
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
