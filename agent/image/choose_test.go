package image

import (
	"slices"
	"testing"
	"time"

	"keelson.dev/keelson/internal/reservedspace"
)

// Unused images are removed if less than 1.5 times the floor is free, until twice the floor is
// free. F106
func TestHowShortADiskIs(t *testing.T) {
	at := func(percent, inodes int64) fileSystem {
		return fileSystem{size: diskSpace{1000, 1000}, free: diskSpace{percent * 10, inodes * 10}}
	}
	for _, c := range []struct {
		name    string
		fs      fileSystem
		keep    reservedspace.Amount
		want    diskSpace
		pressed bool
	}{
		{"enough is free", at(15, 50), reservedspace.Amount{}, diskSpace{}, false},
		{"a little less", at(14, 50), reservedspace.Amount{}, diskSpace{bytes: 60}, false},
		{"below the floor", at(9, 50), reservedspace.Amount{}, diskSpace{bytes: 110}, true},
		{"nothing", at(0, 50), reservedspace.Amount{}, diskSpace{bytes: 200}, true},
		{"inodes", at(50, 5), reservedspace.Amount{}, diskSpace{inodes: 150}, true},
		{"both", at(1, 1), reservedspace.Percent(2), diskSpace{bytes: 30, inodes: 30}, true},
		{"a size says nothing of inodes", at(4, 1), reservedspace.Bytes(50), diskSpace{bytes: 60}, true},
		{"most of the disk is to stay free", at(60, 90), reservedspace.Percent(80), diskSpace{bytes: 300}, true},
		{"more than the disk is to stay free", at(60, 90), reservedspace.Bytes(2000), diskSpace{bytes: 1400}, true},
		{"a file system without inodes", fileSystem{size: diskSpace{bytes: 1000}, free: diskSpace{bytes: 500}},
			reservedspace.Amount{}, diskSpace{}, false},
		{"one that says nothing", fileSystem{}, reservedspace.Amount{}, diskSpace{}, false},
	} {
		if got := c.fs.missingSpace(c.keep); got != c.want {
			t.Errorf("%s: %+v is to be removed, want %+v", c.name, got, c.want)
		}
		if got := c.fs.isBelowFloor(c.keep); got != c.pressed {
			t.Errorf("%s: below its floor: %t", c.name, got)
		}
	}
}

// Only unused images are removed, least recently used first, and no more than requested. F106
func TestWhichImagesAreRemoved(t *testing.T) {
	sizes := map[string]diskSpace{"base": {100, 10}, "a": {50, 5}, "b": {50, 5}, "c": {50, 500}}
	im := func(id string, idle time.Duration, layers ...string) removalCandidate {
		return removalCandidate{id, layers, idle}
	}
	three := []removalCandidate{im("b", 2*time.Hour, "base", "b"), im("a", 3*time.Hour, "base", "a"),
		im("c", time.Hour, "c")}
	set := func(names ...string) map[string]bool {
		out := map[string]bool{}
		for _, n := range names {
			out[n] = true
		}
		return out
	}
	const all = 1 << 20
	for _, c := range []struct {
		name  string
		v     inventory
		want  diskSpace
		gone  []string
		freed diskSpace
	}{
		{"nothing is wanted", inventory{images: three}, diskSpace{}, nil, diskSpace{}},
		{"the oldest does", inventory{images: three}, diskSpace{bytes: 50}, []string{"a"}, diskSpace{50, 5}},
		{"one byte more", inventory{images: three}, diskSpace{bytes: 51}, []string{"a", "b"}, diskSpace{200, 20}},
		{"inodes too", inventory{images: three}, diskSpace{bytes: 50, inodes: 21}, []string{"a", "b", "c"},
			diskSpace{250, 520}},
		{"all that there is", inventory{images: three}, diskSpace{bytes: all}, []string{"a", "b", "c"},
			diskSpace{250, 520}},
		{"a container stands on one", inventory{images: three,
			containers: []containerRecord{{"a", []string{"base", "a"}}}}, diskSpace{bytes: all}, []string{"b", "c"},
			diskSpace{100, 505}},
		{"a container stands on one that was removed",
			inventory{images: three[:1], containers: []containerRecord{{"a", []string{"base", "a"}}}},
			diskSpace{bytes: all}, []string{"b"}, diskSpace{50, 5}},
		{"a pod names one", inventory{images: three, needed: set("b", "")}, diskSpace{bytes: all}, []string{"a", "c"},
			diskSpace{100, 505}},
		{"one has an archive", inventory{images: three, archived: set("c")}, diskSpace{bytes: all}, []string{"a", "b"},
			diskSpace{200, 20}},
		{"a pull is about to use layers", inventory{images: three, busy: set("base", "c")}, diskSpace{bytes: all},
			[]string{"a", "b", "c"}, diskSpace{100, 10}},
		{"one was just asked for", inventory{images: []removalCandidate{im("a", minIdle-1, "a"),
			im("b", minIdle, "b")}}, diskSpace{bytes: all}, []string{"b"}, diskSpace{50, 5}},
		{"the clock was set back", inventory{images: []removalCandidate{im("a", -time.Hour, "a"),
			im("b", time.Hour, "b")}}, diskSpace{bytes: all}, []string{"b", "a"}, diskSpace{100, 10}},
		{"two of one age", inventory{images: []removalCandidate{im("b", time.Hour, "b"), im("a", time.Hour, "a")}},
			diskSpace{bytes: 1}, []string{"a"}, diskSpace{50, 5}},
		{"none is there", inventory{}, diskSpace{bytes: all}, nil, diskSpace{}},
	} {
		c.v.sizes = sizes
		gone, freed := c.v.chooseImages(c.want)
		if !slices.Equal(gone, c.gone) || freed != c.freed {
			t.Errorf("%s: %v with %+v go, want %v with %+v", c.name, gone, freed, c.gone, c.freed)
		}
	}
}
