package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/reservedspace"
)

// Limits bound what an image can cost its node, whatever it says of itself. Zero fields mean the values named.
type Limits struct {
	Entries int64 // of one layer; 1,000,000
	Bytes   int64 // of one layer, unpacked; 64 GiB
	Names   int64 // bytes of memory for names that unpacking a layer has to remember; 64 MiB
	Images  int   // unpacked at the same time; 4
	// Free is what images leave of the file system, and of its inodes the same share; 5%.
	Free reservedspace.Amount
}

func (l Limits) orDefaults() Limits {
	return Limits{Entries: cmp.Or(l.Entries, 1_000_000), Bytes: cmp.Or(l.Bytes, 64<<30), Names: cmp.Or(l.Names, 64<<20),
		Free: cmp.Or(l.Free, reservedspace.Percent(5)), Images: cmp.Or(l.Images, 4)}
}

const (
	maxConfig   = 4 << 20 // bytes of an image's config
	maxManifest = 4 << 20 // bytes of a manifest or index, as registries bound them
	maxLayers   = 150     // more do not fit into the options of a mount
	maxName     = 4096    // bytes of a path, as the kernel has it
	maxHeader   = 4 << 10 // bytes of an archive that an entry takes besides its content, roughly
)

// errLimit says that an image wants more than a node gives.
var errLimit = errors.New("the image exceeds a limit of this node")

// archiveBytes bounds the archive of a layer, headers and padding included.
func (l Limits) archiveBytes() int64 { return l.Bytes + l.Entries*maxHeader }

// bounded fails when more than left bytes are read.
type bounded struct {
	r    io.Reader
	left int64
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("%w: the archive does not end", errLimit)
	}
	n, err := b.r.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// meter counts what one archive has cost. The file system is asked from time to time: other images and pods write, too.
type meter struct {
	limits Limits
	dir    string
	bytes  int64
	names  int64

	entries    int64
	soonBytes  int64 // when to ask again
	soonInodes int64
}

// entry counts one entry of an archive.
func (m *meter) entry(name, link string) error {
	if m.entries++; m.entries > m.limits.Entries {
		return fmt.Errorf("%w: more than %d entries in a layer", errLimit, m.limits.Entries)
	}
	for _, s := range []string{name, link} {
		if len(s) > maxName || len(path.Base(s)) > 255 {
			return fmt.Errorf("%w: a name of %d bytes", errLimit, len(s))
		}
	}
	return m.room(0)
}

// remember counts a name that is kept in memory.
func (m *meter) remember(name string) error {
	const overhead = 96 // of a map's entry and the string's header
	if m.names += int64(len(name)) + overhead; m.names > m.limits.Names {
		return fmt.Errorf("%w: the names of a layer need more than %d bytes of memory", errLimit, m.limits.Names)
	}
	return nil
}

// room says whether n more bytes may be written.
func (m *meter) room(n int64) error {
	if m.bytes+n > m.limits.Bytes {
		return fmt.Errorf("%w: a layer of more than %d bytes", errLimit, m.limits.Bytes)
	}
	if m.bytes+n < m.soonBytes && m.entries < m.soonInodes {
		return nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(m.dir, &st); err != nil {
		return err
	}
	const often = 64 << 20
	free := int64(st.Bavail)*st.Bsize - m.limits.Free.BytesOf(int64(st.Blocks)*st.Bsize)
	inodes := int64(st.Ffree) - m.limits.Free.CountOf(int64(st.Files))
	if n > free || st.Files > 0 && inodes < 1 {
		return fmt.Errorf("%d bytes do not fit: %s of the disk stays free: %w", n, m.limits.Free, unix.ENOSPC)
	}
	m.soonBytes, m.soonInodes = m.bytes+n+min(often, max(free-n, 0)/2), m.entries+4096
	if st.Files > 0 {
		m.soonInodes = m.entries + min(4096, inodes/2)
	}
	return nil
}

// copy writes content, of which size bytes are announced, looking at the room as it goes.
func (m *meter) copy(w io.Writer, content io.Reader, size int64) error {
	if err := m.room(size); err != nil {
		return err
	}
	const chunk = 16 << 20
	for done := int64(0); ; {
		n, err := io.CopyN(w, content, chunk)
		m.bytes, done = m.bytes+n, done+n
		if err == io.EOF {
			if done != size {
				return io.ErrUnexpectedEOF
			}
			return nil
		}
		if err == nil {
			err = m.room(0)
		}
		if err != nil {
			return err
		}
	}
}

// enter waits until another image may be unpacked; leave lets the next one.
func (s *Store) enter(ctx context.Context) (leave func(), err error) {
	select {
	case s.unpacking <- struct{}{}:
		return func() { <-s.unpacking }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
