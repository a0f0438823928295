package image

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"path"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/reservedspace"
)

// Limits bound what an image can consume on its node. A zero field has the default in its comment.
type Limits struct {
	Entries int64 // entries per layer; 1,000,000
	Bytes   int64 // unpacked bytes per layer; 64 GiB
	Names   int64 // bytes of memory for file names while a layer is unpacked; 64 MiB
	Images  int   // images unpacked concurrently; 4
	// Free is the space that must stay free on the file system while an image is unpacked, and the
	// same share of inodes; 5 %.
	Free reservedspace.Amount
}

func (l Limits) orDefaults() Limits {
	return Limits{Entries: cmp.Or(l.Entries, 1_000_000), Bytes: cmp.Or(l.Bytes, 64<<30), Names: cmp.Or(l.Names, 64<<20),
		Free: cmp.Or(l.Free, reservedspace.Percent(5)), Images: cmp.Or(l.Images, 4)}
}

const (
	maxConfig   = 4 << 20 // bytes of an image config
	maxManifest = 4 << 20 // bytes of a manifest or index; the limit of registries
	maxLayers   = 150     // more layers do not fit into mount options
	maxName     = 4096    // bytes of a path; the limit of the kernel
	maxHeader   = 4 << 10 // approximate bytes of an archive entry besides its content
)

// errLimit is returned for an image that exceeds Limits.
var errLimit = errors.New("the image exceeds a limit of this node")

// archiveBytes returns the maximum size of the archive of a layer, including headers and padding.
func (l Limits) archiveBytes() int64 { return l.Bytes + l.Entries*maxHeader }

// boundedReader is an io.Reader that returns an error which wraps errLimit after left more bytes.
type boundedReader struct {
	r    io.Reader
	left int64
}

func (b *boundedReader) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("%w: the archive does not end", errLimit)
	}
	n, err := b.r.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// archiveMeter counts the entries, bytes and names of one archive while it is unpacked. Its methods
// return errLimit when the Limits are exceeded. It checks the free disk space at intervals, because
// other images and pods write to the disk as well.
type archiveMeter struct {
	limits Limits
	dir    string
	bytes  int64
	names  int64

	entries          int64
	nextCheckBytes   int64 // number of bytes at which the file system is checked again
	nextCheckEntries int64
}

// countEntry counts an entry of an archive, with its name and link target. It returns errLimit if a
// limit is exceeded.
func (m *archiveMeter) countEntry(name, link string) error {
	if m.entries++; m.entries > m.limits.Entries {
		return fmt.Errorf("%w: more than %d entries in a layer", errLimit, m.limits.Entries)
	}
	for _, s := range []string{name, link} {
		if len(s) > maxName || len(path.Base(s)) > 255 {
			return fmt.Errorf("%w: a name of %d bytes", errLimit, len(s))
		}
	}
	return m.checkSpace(0)
}

// countName counts a file name that is stored in memory while a layer is unpacked. It returns
// errLimit if a limit is exceeded.
func (m *archiveMeter) countName(name string) error {
	const overhead = 96 // bytes of a map entry and a string header
	if m.names += int64(len(name)) + overhead; m.names > m.limits.Names {
		return fmt.Errorf("%w: the names of a layer need more than %d bytes of memory", errLimit, m.limits.Names)
	}
	return nil
}

// checkSpace returns an error if the next n bytes must not be written. The error is errLimit if the
// layer becomes too large, or ENOSPC if too little disk space would stay free.
func (m *archiveMeter) checkSpace(n int64) error {
	if m.bytes+n > m.limits.Bytes {
		return fmt.Errorf("%w: a layer has more than %d bytes", errLimit, m.limits.Bytes)
	}
	if m.bytes+n < m.nextCheckBytes && m.entries < m.nextCheckEntries {
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
		return fmt.Errorf("not enough space for %d bytes: %s of the disk must stay free: %w", n,
			m.limits.Free, unix.ENOSPC)
	}
	m.nextCheckBytes, m.nextCheckEntries = m.bytes+n+min(often, max(free-n, 0)/2), m.entries+4096
	if st.Files > 0 {
		m.nextCheckEntries = m.entries + min(4096, inodes/2)
	}
	return nil
}

// copyContent copies the content of an archive entry with size bytes to w, and checks the limits
// while it writes.
func (m *archiveMeter) copyContent(w io.Writer, content io.Reader, size int64) error {
	if err := m.checkSpace(size); err != nil {
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
			err = m.checkSpace(0)
		}
		if err != nil {
			return err
		}
	}
}
