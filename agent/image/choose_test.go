package image

import (
	"slices"
	"testing"
	"time"

	"keelson.dev/keelson/internal/reservedspace"
)

// Images are removed from a disk that has less than half as much again as has to stay free, up to twice as much. F106
func TestHowShortADiskIs(t *testing.T) {
	at := func(percent, inodes int64) fileSystem {
		return fileSystem{size: room{1000, 1000}, free: room{percent * 10, inodes * 10}}
	}
	for _, c := range []struct {
		name    string
		fs      fileSystem
		keep    reservedspace.Amount
		want    room
		pressed bool
	}{
		{"enough is free", at(15, 50), reservedspace.Amount{}, room{}, false},
		{"a little less", at(14, 50), reservedspace.Amount{}, room{bytes: 60}, false},
		{"below the floor", at(9, 50), reservedspace.Amount{}, room{bytes: 110}, true},
		{"nothing", at(0, 50), reservedspace.Amount{}, room{bytes: 200}, true},
		{"inodes", at(50, 5), reservedspace.Amount{}, room{inodes: 150}, true},
		{"both", at(1, 1), reservedspace.Percent(2), room{bytes: 30, inodes: 30}, true},
		{"a size says nothing of inodes", at(4, 1), reservedspace.Bytes(50), room{bytes: 60}, true},
		{"most of the disk is to stay free", at(60, 90), reservedspace.Percent(80), room{bytes: 300}, true},
		{"more than the disk is to stay free", at(60, 90), reservedspace.Bytes(2000), room{bytes: 1400}, true},
		{"a file system without inodes", fileSystem{size: room{bytes: 1000}, free: room{bytes: 500}}, reservedspace.Amount{}, room{}, false},
		{"one that says nothing", fileSystem{}, reservedspace.Amount{}, room{}, false},
	} {
		if got := c.fs.short(c.keep); got != c.want {
			t.Errorf("%s: %+v is to be removed, want %+v", c.name, got, c.want)
		}
		if got := c.fs.pressed(c.keep); got != c.pressed {
			t.Errorf("%s: below its floor: %t", c.name, got)
		}
	}
}

// What is removed is what nothing uses, the longest unused first, and no more than is asked for. F106
func TestWhichImagesAreRemoved(t *testing.T) {
	sizes := map[string]room{"base": {100, 10}, "a": {50, 5}, "b": {50, 5}, "c": {50, 500}}
	im := func(id string, idle time.Duration, layers ...string) candidate { return candidate{id, layers, idle} }
	three := []candidate{im("b", 2*time.Hour, "base", "b"), im("a", 3*time.Hour, "base", "a"), im("c", time.Hour, "c")}
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
		want  room
		gone  []string
		freed room
	}{
		{"nothing is wanted", inventory{images: three}, room{}, nil, room{}},
		{"the oldest does", inventory{images: three}, room{bytes: 50}, []string{"a"}, room{50, 5}},
		{"one byte more", inventory{images: three}, room{bytes: 51}, []string{"a", "b"}, room{200, 20}},
		{"inodes too", inventory{images: three}, room{bytes: 50, inodes: 21}, []string{"a", "b", "c"}, room{250, 520}},
		{"all that there is", inventory{images: three}, room{bytes: all}, []string{"a", "b", "c"}, room{250, 520}},
		{"a container stands on one", inventory{images: three, containers: []container{{"a", []string{"base", "a"}}}}, room{bytes: all}, []string{"b", "c"}, room{100, 505}},
		{"a container stands on one that was removed", inventory{images: three[:1], containers: []container{{"a", []string{"base", "a"}}}}, room{bytes: all}, []string{"b"}, room{50, 5}},
		{"a pod names one", inventory{images: three, needed: set("b", "")}, room{bytes: all}, []string{"a", "c"}, room{100, 505}},
		{"one has an archive", inventory{images: three, archived: set("c")}, room{bytes: all}, []string{"a", "b"}, room{200, 20}},
		{"a pull is about to use layers", inventory{images: three, busy: set("base", "c")}, room{bytes: all}, []string{"a", "b", "c"}, room{100, 10}},
		{"one was just asked for", inventory{images: []candidate{im("a", leastIdle-1, "a"), im("b", leastIdle, "b")}}, room{bytes: all}, []string{"b"}, room{50, 5}},
		{"the clock was set back", inventory{images: []candidate{im("a", -time.Hour, "a"), im("b", time.Hour, "b")}}, room{bytes: all}, []string{"b", "a"}, room{100, 10}},
		{"two of one age", inventory{images: []candidate{im("b", time.Hour, "b"), im("a", time.Hour, "a")}}, room{bytes: 1}, []string{"a"}, room{50, 5}},
		{"none is there", inventory{}, room{bytes: all}, nil, room{}},
	} {
		c.v.sizes = sizes
		gone, freed := c.v.choose(c.want)
		if !slices.Equal(gone, c.gone) || freed != c.freed {
			t.Errorf("%s: %v with %+v go, want %v with %+v", c.name, gone, freed, c.gone, c.freed)
		}
	}
}
