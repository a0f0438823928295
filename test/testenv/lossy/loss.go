package lossy

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
)

// Fate is what a power cut does to what was not synced.
type Fate uint8

const (
	Lost Fate = iota // all of it is gone
	Kept             // all of it is there, as if the cache had been written out just before
	Torn             // some of it is there
)

func (f Fate) String() string { return [...]string{"lost", "kept", "torn"}[f] }

// Loss is a way to lose what was not synced.
type Loss struct {
	Data    Fate // of files: writes and lengths
	Entries Fate // of folders: files made, renamed and removed
	// Seed decides what is kept of what is torn.
	Seed uint64
	// Block is how many bytes the disk writes at once, all or none; 0 = 512.
	Block int
}

func (l Loss) block() int {
	if l.Block == 0 {
		return 512
	}
	return l.Block
}

func (l Loss) String() string {
	if l.Data != Torn && l.Entries != Torn {
		return fmt.Sprintf("data %s, entries %s", l.Data, l.Entries)
	}
	return fmt.Sprintf("data %s, entries %s, seed %d, blocks of %d", l.Data, l.Entries, l.Seed, l.block())
}

// Losses are the ways worth trying. Those that tear do it by the seed.
func Losses(seed uint64) []Loss {
	return []Loss{
		{},
		{Data: Torn, Entries: Torn, Seed: seed, Block: 512},
		{Data: Kept, Entries: Lost},
		{Data: Torn, Entries: Kept, Seed: seed, Block: 4096},
		{Data: Lost, Entries: Kept},
		{Data: Torn, Entries: Kept, Seed: seed, Block: 512},
		{Data: Torn, Entries: Lost, Seed: seed, Block: 4096},
		{Data: Kept, Entries: Torn, Seed: seed},
	}
}

// dice decide what is kept.
type dice struct {
	loss Loss
	rand *rand.Rand
	odds float64 // of keeping: the same for all of one power cut, so that some cuts lose little and some much
}

func (l Loss) dice() *dice {
	r := rand.New(rand.NewPCG(l.Seed, 0x6b65656c))
	return &dice{loss: l, rand: r, odds: []float64{0.15, 0.5, 0.85, 0.98}[r.IntN(4)]}
}

func (d *dice) keep() bool { return d.rand.Float64() < d.odds }

// after is the volume that a power cut leaves, all of it on the platter.
func (v *volume) after(l Loss) *volume {
	v.mu.Lock()
	defer v.mu.Unlock()
	d := l.dice()
	tables := v.tables(d)
	n := newVolume(v.faults)
	var copied func(to, from *inode)
	copied = func(to, from *inode) {
		table := tables[from]
		if table == nil {
			table = from.disk
		}
		for _, name := range slices.Sorted(maps.Keys(table)) {
			old := table[name]
			made := n.newInode(old.mode, name)
			if old.folder() {
				copied(made, old)
			} else {
				made.file = newContent(old.file.after(d))
				n.used += made.file.room()
			}
			to.now[name], to.disk[name] = made, made
		}
	}
	copied(n.root, v.root)
	return n
}

// tables are the folders' entries after a power cut, of those that differ from
// what the platter is sure to have.
func (v *volume) tables(d *dice) map[*inode]map[string]*inode {
	out := make(map[*inode]map[string]*inode)
	over := make(map[*inode]bool) // folders that get nothing more
	for _, m := range v.moves {
		kept := d.loss.Entries == Kept || d.loss.Entries == Torn && d.keep()
		for _, s := range m {
			kept = kept && !over[s.in]
		}
		for _, s := range m {
			if !kept {
				over[s.in] = true
				continue
			}
			if out[s.in] == nil {
				out[s.in] = maps.Clone(s.in.disk)
			}
			s.take(out[s.in])
		}
	}
	return out
}
