package lossy

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
)

// Fate is the effect of a power cut on unsynced changes.
type Fate uint8

const (
	Lost Fate = iota // all of them are lost
	Kept             // all of them are kept, as if the cache was written just before
	Torn             // some of them are kept
)

func (f Fate) String() string { return [...]string{"lost", "kept", "torn"}[f] }

// Loss specifies which unsynced changes a power cut loses.
type Loss struct {
	Data    Fate // of files: writes and lengths
	Entries Fate // of folders: files created, renamed and removed
	// Seed decides which of the torn changes are kept.
	Seed uint64
	// Block is the number of bytes that the disk writes atomically; 0 = 512.
	Block int
}

func (l Loss) blockSize() int {
	if l.Block == 0 {
		return 512
	}
	return l.Block
}

func (l Loss) String() string {
	if l.Data != Torn && l.Entries != Torn {
		return fmt.Sprintf("data %s, entries %s", l.Data, l.Entries)
	}
	return fmt.Sprintf("data %s, entries %s, seed %d, blocks of %d", l.Data, l.Entries, l.Seed, l.blockSize())
}

// Losses returns the kinds of loss that are worth testing. A loss with Torn changes uses the seed.
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

// dice decides randomly which changes are kept.
type dice struct {
	loss Loss
	rand *rand.Rand
	odds float64 // probability of keeping a change, chosen once per power cut: some cuts lose little and some much
}

func (l Loss) newDice() *dice {
	r := rand.New(rand.NewPCG(l.Seed, 0x6b65656c))
	return &dice{loss: l, rand: r, odds: []float64{0.15, 0.5, 0.85, 0.98}[r.IntN(4)]}
}

func (d *dice) keepsChange() bool { return d.rand.Float64() < d.odds }

// afterCrash returns the volume after a power cut. All of its content is durable.
func (v *volume) afterCrash(l Loss) *volume {
	v.mu.Lock()
	defer v.mu.Unlock()
	d := l.newDice()
	tables := v.entriesAfterCrash(d)
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
			if old.isFolder() {
				copied(made, old)
			} else {
				made.file = newContent(old.file.afterCrash(d))
				n.used += made.file.allocatedBytes()
			}
			to.now[name], to.disk[name] = made, made
		}
	}
	copied(n.root, v.root)
	return n
}

// entriesAfterCrash returns the entries of folders after a power cut, for folders that differ from
// their durable entries.
func (v *volume) entriesAfterCrash(d *dice) map[*inode]map[string]*inode {
	out := make(map[*inode]map[string]*inode)
	over := make(map[*inode]bool) // folders that keep no further changes
	for _, m := range v.moves {
		kept := d.loss.Entries == Kept || d.loss.Entries == Torn && d.keepsChange()
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
			s.applyTo(out[s.in])
		}
	}
	return out
}
