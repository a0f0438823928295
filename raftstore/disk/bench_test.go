package disk

import (
	"fmt"
	"testing"

	"github.com/hashicorp/raft"
)

// BenchmarkAppend measures one durable append of a log entry through all layers, with either log
// store, encrypted and not.
func BenchmarkAppend(b *testing.B) {
	for _, kind := range logKinds {
		for _, keys := range []*Keyring{nil, newTestKeyring("k1")} {
			for _, size := range []int{1 << 10, 64 << 10, 1 << 20} {
				name := fmt.Sprintf("%s/%d", kind, size)
				if keys != nil {
					name = fmt.Sprintf("%s-sealed/%d", kind, size)
				}
				b.Run(name, func(b *testing.B) { benchmarkAppend(b, kind, keys, size) })
			}
		}
	}
}

func benchmarkAppend(b *testing.B, kind LogStoreKind, keys *Keyring, size int) {
	c := Config{Name: "r1", Dir: b.TempDir(), LogStore: kind, Keys: keys}.withDefaults()
	d, err := openDisk(c, func(err error) { b.Error(err) })
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	b.SetBytes(int64(size))
	b.ReportAllocs()
	index := uint64(0)
	for b.Loop() {
		index++
		if err := d.Log.StoreLog(&raft.Log{Index: index, Term: 1, Data: make([]byte, size)}); err != nil {
			b.Fatal(err)
		}
		if index%20_000 == 0 || size > 1<<16 && index%500 == 0 {
			first, err := d.Log.FirstIndex()
			if err == nil {
				err = d.Log.DeleteRange(first, index-10)
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	}
}
