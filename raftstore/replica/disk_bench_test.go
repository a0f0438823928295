package replica

import (
	"fmt"
	"testing"

	"github.com/hashicorp/raft"
)

// BenchmarkAppend is what one durable append of a log entry costs, through all
// layers of the disk.
func BenchmarkAppend(b *testing.B) {
	for _, size := range []int{1 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			c := Config{Name: "r1", DataDir: b.TempDir()}.withDefaults()
			d, err := openDisk(c, func(err error) { b.Error(err) })
			if err != nil {
				b.Fatal(err)
			}
			defer d.close.Close()
			b.SetBytes(int64(size))
			b.ReportAllocs()
			index := uint64(0)
			for b.Loop() {
				index++
				if err := d.logs.StoreLog(&raft.Log{Index: index, Term: 1, Data: make([]byte, size)}); err != nil {
					b.Fatal(err)
				}
				if index%20_000 == 0 || size > 1<<16 && index%500 == 0 {
					first, err := d.logs.FirstIndex()
					if err == nil {
						err = d.logs.DeleteRange(first, index-10)
					}
					if err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}
