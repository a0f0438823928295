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

// openOnSmallDisk runs a store on a disk of 8 MiB, of which keep bytes must stay free.
func openOnSmallDisk(t *testing.T, keep int64, cfg Config) (*Store, func()) {
	t.Helper()
	needRoot(t)
	if cfg.Root == "" {
		cfg.Root = filepath.Join(t.TempDir(), "images")
		mountTmpfs(t, cfg.Root)
	}
	cfg.Floor, cfg.Limits.Free = reservedspace.Bytes(keep), reservedspace.Bytes(keep/2)
	return openStore(t, cfg)
}

// newFiller returns the content of a unique layer with size bytes.
func newFiller(name string, size int) []entry {
	return []entry{{name: name, content: strings.Repeat(name[:1], size)}}
}

func freeOn(t *testing.T, s *Store) int64 {
	t.Helper()
	fs, err := s.space.statFileSystem()
	if err != nil {
		t.Fatal(err)
	}
	return fs.free.bytes
}

// writeAsPods uses disk space of a running store.
func writeAsPods(t *testing.T, s *Store, size int) {
	t.Helper()
	if err := os.WriteFile(s.storePath("tmp/pods"), make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
}

// presentTags returns the tags of all images in the store.
func presentTags(t *testing.T, s *Store) (tags []string) {
	t.Helper()
	r, err := s.ListImages(testContext(t), &cri.ListImagesRequest{})
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

// If the disk is low on space, unused images are removed, so that a failed pull succeeds. Images of
// containers and pods stay. F106
func TestRoomIsMade(t *testing.T) {
	reg := newRegistry(t)
	s, _ := openOnSmallDisk(t, 2<<20, Config{Insecure: []string{reg.host}})
	for _, n := range []string{"used", "named", "old", "older"} {
		reg.pushImage(t, n+":v1", newTestImage(t, newFiller(n, 3<<19)))
		if _, err := pullImage(t, s, reg.host+"/"+n+":v1", nil); err != nil {
			t.Fatal(err)
		}
	}
	reg.pushImage(t, "new:v1", newTestImage(t, newFiller("z", 2<<20)))
	if _, err := pullImage(t, s, reg.host+"/new:v1", nil); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("a pull onto a full disk: %v", err)
	}
	if _, err := s.PrepareRootFS(testContext(t), "c1", reg.host+"/used:v1"); err != nil {
		t.Fatal(err)
	}
	if done, err := s.MakeRoom(testContext(t), nil); err != nil || done.Images != 0 || !done.Short {
		t.Errorf("right after the pulls: %+v, %v; they are about to be used", done, err)
	}
	s.now = func() time.Time { return time.Now().Add(time.Hour) }
	done, err := s.MakeRoom(testContext(t), []string{reg.host + "/named:v1"})
	if err != nil || done.Images != 2 || done.Bytes < 3<<20 || done.Short {
		t.Errorf("%+v, %v", done, err)
	}
	if got := presentTags(t, s); !slices.Equal(got, []string{"named:v1", "used:v1"}) {
		t.Errorf("%v are left", got)
	}
	if free := freeOn(t, s); free < 4<<20 {
		t.Errorf("%d bytes are free", free)
	}
	if _, err := pullImage(t, s, reg.host+"/new:v1", nil); err != nil {
		t.Error(err)
	}
}

// If the disk is low on space, an image is removed right after its last container. An image that
// was requested since stays. F106 F95
func TestImagesGoWithTheirContainers(t *testing.T) {
	reg := newRegistry(t)
	s, _ := openOnSmallDisk(t, 2<<20, Config{Insecure: []string{reg.host}})
	for _, n := range []string{"ended", "asked"} {
		reg.pushImage(t, n+":v1", newTestImage(t, newFiller(n, 2<<20)))
		if _, err := pullImage(t, s, reg.host+"/"+n+":v1", nil); err != nil {
			t.Fatal(err)
		}
		if _, err := s.PrepareRootFS(testContext(t), n, reg.host+"/"+n+":v1"); err != nil {
			t.Fatal(err)
		}
	}
	writeAsPods(t, s, 3<<19)
	began := time.Now()
	s.now = func() time.Time { return began.Add(time.Hour) }
	if done, err := s.MakeRoom(testContext(t), nil); err != nil || done.Images != 0 {
		t.Fatalf("while containers stand on them: %+v, %v", done, err)
	}
	if _, err := s.ImageStatus(testContext(t),
		&cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: reg.host + "/asked:v1"}}); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"ended", "asked"} {
		if err := s.RemoveRootFS(testContext(t), n); err != nil {
			t.Fatal(err)
		}
	}
	if done, err := s.MakeRoom(testContext(t), nil); err != nil || done.Images != 1 {
		t.Errorf("%+v, %v", done, err)
	}
	if got := presentTags(t, s); !slices.Equal(got, []string{"asked:v1"}) {
		t.Errorf("%v are left", got)
	}
}

// Running deletions may free enough space. No image is removed before they end, unless they take
// too long. F106 F95
func TestRoomWaitsForWhatGoes(t *testing.T) {
	needRoot(t)
	file := newOCIArchive(t, map[string]v1.Image{"x.dev/a:v1": newTestImage(t, newFiller("a", 1<<20))}, nil)
	virtual.Test(t, func(t *testing.T) {
		s, _ := openOnSmallDisk(t, 2<<20, Config{})
		if _, err := s.Import(testContext(t), file); err != nil {
			t.Fatal(err)
		}
		for _, goes := range []bool{true, false} {
			writeAsPods(t, s, 11<<19)
			time.Sleep(time.Hour)
			type answer struct {
				Removed
				err error
			}
			end, got := s.trash.deleting.startDeletion(), make(chan answer, 1)
			go func() {
				done, err := s.MakeRoom(testContext(t), nil)
				got <- answer{done, err}
			}()
			time.Sleep(deletionTimeout - time.Second)
			virtual.Wait()
			if len(got) > 0 {
				t.Fatalf("%+v: it does not wait", <-got)
			}
			if goes {
				if err := os.Remove(s.storePath("tmp/pods")); err != nil {
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

// An image stays if its last container was removed while the space was measured, because that
// removal may free enough. F106 F95
func TestAnImageOutlivesItsContainerByALook(t *testing.T) {
	reg := newRegistry(t)
	s, _ := openOnSmallDisk(t, 2<<20, Config{Insecure: []string{reg.host}})
	reg.pushImage(t, "a:v1", newTestImage(t, newFiller("a", 1<<20)))
	if _, err := pullImage(t, s, reg.host+"/a:v1", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := s.PrepareRootFS(testContext(t), "c", reg.host+"/a:v1"); err != nil {
		t.Fatal(err)
	}
	s.now = func() time.Time { return time.Now().Add(time.Hour) }
	stood := s.imagesOfContainers()
	if err := s.RemoveRootFS(testContext(t), "c"); err != nil {
		t.Fatal(err)
	}
	for want, stood := range []map[string]bool{stood, s.imagesOfContainers()} {
		if done, err := s.removeUnused(nil, stood, diskSpace{bytes: 1}); err != nil || done.Images != want {
			t.Errorf("%+v, %v; want %d", done, err, want)
		}
	}
}

// Without a shortage nothing is removed, however long it was unused. F106
func TestNoRoomIsMadeWithoutNeed(t *testing.T) {
	reg := newRegistry(t)
	s, _ := openOnSmallDisk(t, 1<<20, Config{Insecure: []string{reg.host}})
	reg.pushImage(t, "a:v1", newTestImage(t, newFiller("a", 1<<20)))
	if _, err := pullImage(t, s, reg.host+"/a:v1", nil); err != nil {
		t.Fatal(err)
	}
	s.now = func() time.Time { return time.Now().Add(1000 * time.Hour) }
	if done, err := s.MakeRoom(testContext(t), nil); err != nil || done != (Removed{}) {
		t.Errorf("%+v, %v", done, err)
	}
	if got := presentTags(t, s); len(got) != 1 {
		t.Errorf("%v are left", got)
	}
}

// The last use of images persists across restarts: an image that was pulled first and used last
// stays longest. F106
func TestTheLastUseIsKept(t *testing.T) {
	reg := newRegistry(t)
	s, stop := openOnSmallDisk(t, 2<<20, Config{Insecure: []string{reg.host}})
	began := time.Now()
	for i, n := range []string{"first", "second", "third"} {
		s.now = func() time.Time { return began.Add(time.Duration(i-10) * time.Hour) }
		reg.pushImage(t, n+":v1", newTestImage(t, newFiller(n, 3<<19)))
		if _, err := pullImage(t, s, reg.host+"/"+n+":v1", nil); err != nil {
			t.Fatal(err)
		}
	}
	s.now = func() time.Time { return began.Add(-time.Hour) }
	if _, err := s.ImageStatus(testContext(t),
		&cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: reg.host + "/first:v1"}}); err != nil {
		t.Fatal(err)
	}
	// Moving a tag away from an image is not a use of that image.
	s.now = func() time.Time { return began.Add(-2 * time.Hour) }
	reg.pushImage(t, "second:v1", newTestImage(t, []entry{{name: "x", content: "x"}}))
	if _, err := pullImage(t, s, reg.host+"/second:v1", nil); err != nil {
		t.Fatal(err)
	}
	stop()
	s, _ = openOnSmallDisk(t, 2<<20, Config{Root: s.cfg.Root})
	if got := presentTags(t, s); len(got) != 3 {
		t.Fatalf("after a restart: %v", got)
	}
	writeAsPods(t, s, 1<<19)
	if done, err := s.MakeRoom(testContext(t), nil); err != nil || done.Images != 1 {
		t.Errorf("%+v, %v; want the one to go that was used nine hours ago", done, err)
	}
	if got := presentTags(t, s); !slices.Equal(got, []string{"first:v1", "second:v1", "third:v1"}) {
		t.Errorf("%v are left", got)
	}
	var idle []time.Duration
	for _, im := range s.images {
		idle = append(idle, began.Sub(im.lastUsed).Round(time.Hour))
	}
	if slices.Sort(idle); !slices.Equal(idle, []time.Duration{time.Hour, 2 * time.Hour, 8 * time.Hour}) {
		t.Errorf("unused for %v", idle)
	}
}

// An image stays while the next start would import its archive again. After the archive is deleted,
// it is removed like any other. F106
func TestImagesOfArchivesStay(t *testing.T) {
	archives := t.TempDir()
	file := filepath.Join(archives, "a.tar")
	if err := os.Rename(newOCIArchive(t, map[string]v1.Image{"x.dev/a:v1": newTestImage(t, newFiller("a", 1<<20))},
		nil), file); err != nil {
		t.Fatal(err)
	}
	s, _ := openOnSmallDisk(t, 2<<20, Config{Archives: archives})
	if got := presentTags(t, s); len(got) != 1 {
		t.Fatalf("imported: %v", got)
	}
	writeAsPods(t, s, 9<<19)
	s.now = func() time.Time { return time.Now().Add(time.Hour) }
	if done, err := s.MakeRoom(testContext(t), nil); err != nil || done.Images != 0 {
		t.Errorf("with its archive: %+v, %v", done, err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if done, err := s.MakeRoom(testContext(t), nil); err != nil || done.Images != 1 {
		t.Errorf("without: %+v, %v", done, err)
	}
}

// A pull reuses a layer of an old image. If that image is removed during the pull, the layer stays,
// and the new image is complete. F106
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
	shared, other := newFiller("s", 2<<20), newFiller("o", 2<<20)
	fresh := newTestImage(t, shared, newFiller("f", 1000))
	reg.pushImage(t, "old:v1", newTestImage(t, shared))
	reg.pushImage(t, "other:v1", newTestImage(t, other))
	reg.pushImage(t, "new:v1", fresh)
	layers, err := fresh.Layers()
	if err != nil {
		t.Fatal(err)
	}
	d, err := layers[1].Digest()
	if err != nil {
		t.Fatal(err)
	}
	slow = d.String()
	s, _ := openOnSmallDisk(t, 3<<20, Config{Insecure: []string{host}})
	for _, n := range []string{"old", "other"} {
		if _, err := pullImage(t, s, host+"/"+n+":v1", nil); err != nil {
			t.Fatal(err)
		}
	}
	s.now = func() time.Time { return time.Now().Add(time.Hour) }
	pulled := make(chan error, 1)
	go func() {
		_, err := pullImage(t, s, host+"/new:v1", nil)
		pulled <- err
	}()
	<-reached
	if done, err := s.MakeRoom(testContext(t), nil); err != nil || done.Images != 2 || done.Bytes >= 3<<20 {
		t.Errorf("during the pull: %+v, %v; want both images gone and one layer", done, err)
	}
	close(let)
	if err := <-pulled; err != nil {
		t.Fatal(err)
	}
	fs, err := s.PrepareRootFS(testContext(t), "c1", host+"/new:v1")
	if err != nil {
		t.Fatal(err)
	}
	for i, file := range []string{"f", "s"} {
		if _, err := os.Stat(filepath.Join(fs.Lower[i], file)); err != nil {
			t.Error(err)
		}
	}
	if done, err := s.MakeRoom(testContext(t), nil); err != nil || done.Images != 0 {
		t.Errorf("after the pull: %+v, %v", done, err)
	}
}

// A layer that a pull will use stays, also while its record is written. Others are removed. F106
func TestLayersOfPullsStay(t *testing.T) {
	s, _ := openStore(t, Config{})
	presentTags(t, s) // the pull has started
	for _, name := range []string{"aa.json", "aa.json.new", "bb.json", "bb.json.new"} {
		if err := os.WriteFile(s.storePath("layers", name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.mu.Lock()
	s.busy["aa"] = 1
	err := s.removeUnusedLayers()
	s.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(s.storePath("layers"))
	if err != nil || len(entries) != 2 || entries[0].Name() != "aa.json" || entries[1].Name() != "aa.json.new" {
		t.Errorf("there are %v, error %v", entries, err)
	}
}

// A caller that requested an image finds it when it creates a container, even if images are removed
// concurrently. F106
func TestRoomIsMadeWhileContainersStart(t *testing.T) {
	reg := newRegistry(t)
	s, _ := openOnSmallDisk(t, 4<<20, Config{Insecure: []string{reg.host}})
	name := reg.host + "/a:v1"
	reg.pushImage(t, "a:v1", newTestImage(t, newFiller("a", 3<<19)))
	presentTags(t, s)
	writeAsPods(t, s, 2<<20)
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			if _, err := s.MakeRoom(testContext(t), nil); err != nil {
				ended <- err
				return
			}
		}
	}()
	for i := range 20 {
		id, err := pullImage(t, s, name, nil)
		if err == nil {
			_, err = s.Config(testContext(t), id)
		}
		container := fmt.Sprint("c", i)
		if err == nil {
			_, err = s.PrepareRootFS(testContext(t), container, id)
		}
		if err == nil {
			err = s.RemoveRootFS(testContext(t), container)
		}
		if err != nil {
			t.Fatal(err)
		}
		s.mu.Lock() // an hour without use
		for _, im := range s.images {
			im.lastUsed = im.lastUsed.Add(-time.Hour)
		}
		s.mu.Unlock()
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
