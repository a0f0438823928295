package node

import (
	"sync/atomic"
	"time"

	"keelson.dev/keelson/agent/eviction"
)

// imageCollector is the part of imageGC with which diskReclaimer removes images.
type imageCollector interface {
	// requestCollection requests a collection of unused images. It reports whether a collection
	// that started at or after since has completed.
	requestCollection(since time.Time) bool
}

// diskReclaimer frees disk space while the node has disk pressure, before pods are evicted. It
// first removes the data of exited containers, and then the images that they used. Its methods are
// not safe for concurrent use, except isSparing.
type diskReclaimer struct {
	images           imageCollector // nil: an external runtime owns the images
	shortSince       time.Time      // start of the disk pressure; zero = none
	nothingLeftSince time.Time      // time since which no data of exited containers is left; zero = some is left
	sparing          atomic.Bool    // data of exited containers is being removed
}

// isShort reports whether the node has a shortage of disk space or inodes.
func (d *diskReclaimer) isShort() bool { return !d.shortSince.IsZero() }

// startReclaim starts to free disk space because a shortage has started.
func (d *diskReclaimer) startReclaim(pods evictablePods, now time.Time) {
	d.shortSince = now
	d.reclaimDisk(pods, now)
}

// endReclaim ends the removal of data of exited containers when the shortage ends.
func (d *diskReclaimer) endReclaim(pods evictablePods) {
	d.shortSince, d.nothingLeftSince = time.Time{}, time.Time{}
	d.sparing.Store(false)
	pods.SetDiskReclaim(false)
}

// reclaimDisk continues to free disk space: first it removes the data of exited containers, then
// the images that they used. It returns true when nothing more can be removed.
func (d *diskReclaimer) reclaimDisk(pods evictablePods, now time.Time) bool {
	// set before the removal, which makes images unused
	d.sparing.Store(now.Sub(d.shortSince) < eviction.ReclaimTimeout)
	if pods.SetDiskReclaim(true) > 0 {
		d.nothingLeftSince = time.Time{}
		return false
	}
	d.sparing.Store(false)
	if d.nothingLeftSince.IsZero() {
		d.nothingLeftSince = now
	}
	return d.images == nil || d.images.requestCollection(d.nothingLeftSince)
}

// isSparing reports whether images should not be removed yet, because data of exited containers is
// being removed, which may free enough disk space.
func (d *diskReclaimer) isSparing() bool { return d.sparing.Load() }
