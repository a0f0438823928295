package diskusage

import (
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/virtual"
)

// A file system that hangs delays measurements for a bounded time, and blocks at most one of them.
func TestHangingFileSystems(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		var d FileSystemCache
		var looks atomic.Int32
		hang := make(chan struct{})
		of := func(path string) (agent.Disk, error) {
			looks.Add(1)
			if path == "/hangs" {
				<-hang
			}
			return agent.Disk{Capacity: 7}, nil
		}
		if got := d.FetchSamples([]string{"/a"}, of); got["/a"].Disk.Capacity != 7 {
			t.Errorf("%v", got)
		}
		for range 3 {
			begin := time.Now()
			if got := d.FetchSamples([]string{"/a", "/hangs"}, of); got["/a"].Disk.Capacity != 7 ||
				time.Since(begin) > diskPatience {
				t.Errorf("after %v: %v", time.Since(begin), got)
			}
		}
		if n := looks.Load(); n != 3 {
			t.Errorf("%d looks", n)
		}
		close(hang)
		virtual.Wait()
		if got := d.FetchSamples([]string{"/a", "/hangs"}, of); got["/hangs"].Disk.Capacity != 7 {
			t.Errorf("%v", got)
		}
	})
}
