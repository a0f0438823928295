package lossy

import (
	"context"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// node adapts an inode of a volume to the FUSE library.
type node struct {
	fs.Inode
	volume *volume
	inode  *inode
}

var (
	_ fs.NodeLookuper  = (*node)(nil)
	_ fs.NodeReaddirer = (*node)(nil)
	_ fs.NodeCreater   = (*node)(nil)
	_ fs.NodeMkdirer   = (*node)(nil)
	_ fs.NodeUnlinker  = (*node)(nil)
	_ fs.NodeRmdirer   = (*node)(nil)
	_ fs.NodeRenamer   = (*node)(nil)
	_ fs.NodeOpener    = (*node)(nil)
	_ fs.NodeReader    = (*node)(nil)
	_ fs.NodeWriter    = (*node)(nil)
	_ fs.NodeAllocater = (*node)(nil)
	_ fs.NodeFsyncer   = (*node)(nil)
	_ fs.NodeGetattrer = (*node)(nil)
	_ fs.NodeSetattrer = (*node)(nil)
	_ fs.NodeStatfser  = (*node)(nil)
)

// childInode returns the FUSE inode of an inode in this folder.
func (n *node) childInode(ctx context.Context, i *inode, out *fuse.Attr) *fs.Inode {
	n.volume.fillAttributes(i, out)
	return n.NewInode(ctx, &node{volume: n.volume, inode: i}, fs.StableAttr{Mode: out.Mode & syscall.S_IFMT, Ino: i.id})
}

func (v *volume) fillAttributes(i *inode, out *fuse.Attr) {
	mode, size := v.statInode(i)
	out.Mode, out.Size, out.Ino, out.Nlink, out.Blksize = mode, uint64(size), i.id, 1, blockBytes
	out.Blocks = (out.Size + 511) / 512
}

func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	i := n.volume.lookupEntry(n.inode, name)
	if i == nil {
		return nil, syscall.ENOENT
	}
	return n.childInode(ctx, i, &out.Attr), 0
}

func (n *node) Readdir(context.Context) (fs.DirStream, syscall.Errno) {
	var out []fuse.DirEntry
	for _, e := range n.volume.listEntries(n.inode) {
		out = append(out, fuse.DirEntry{Name: e.name, Ino: e.is.id, Mode: e.is.mode & syscall.S_IFMT})
	}
	return fs.NewListDirStream(out), 0
}

func (n *node) Create(ctx context.Context, name string, _, mode uint32, out *fuse.EntryOut) (
	*fs.Inode, fs.FileHandle, uint32, syscall.Errno,
) {
	i, errno := n.volume.createEntry(n.inode, name, syscall.S_IFREG|mode&0o7777)
	if errno != 0 {
		return nil, nil, 0, errno
	}
	return n.childInode(ctx, i, &out.Attr), nil, fuse.FOPEN_KEEP_CACHE, 0
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	i, errno := n.volume.createEntry(n.inode, name, syscall.S_IFDIR|mode&0o7777)
	if errno != 0 {
		return nil, errno
	}
	return n.childInode(ctx, i, &out.Attr), 0
}

func (n *node) Unlink(_ context.Context, name string) syscall.Errno {
	return n.volume.removeEntry(n.inode, name)
}

func (n *node) Rmdir(_ context.Context, name string) syscall.Errno {
	return n.volume.removeEntry(n.inode, name)
}

func (n *node) Rename(_ context.Context, name string, to fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	if flags != 0 {
		return syscall.EINVAL
	}
	return n.volume.renameEntry(n.inode, name, to.(*node).inode, newName)
}

// Open lets the kernel keep its cached pages, because every write goes through the kernel.
func (n *node) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if flags&syscall.O_TRUNC != 0 {
		if errno := n.volume.resizeFile(n.inode, 0); errno != 0 {
			return nil, 0, errno
		}
	}
	return nil, fuse.FOPEN_KEEP_CACHE, 0
}

func (n *node) Read(_ context.Context, _ fs.FileHandle, dest []byte, at int64) (fuse.ReadResult, syscall.Errno) {
	got, errno := n.volume.readFile(n.inode, dest, at)
	if errno != 0 {
		return nil, errno
	}
	return fuse.ReadResultData(dest[:got]), 0
}

func (n *node) Write(_ context.Context, _ fs.FileHandle, data []byte, at int64) (uint32, syscall.Errno) {
	done, errno := n.volume.writeFile(n.inode, data, at)
	return uint32(done), errno
}

func (n *node) Allocate(_ context.Context, _ fs.FileHandle, at, size uint64, mode uint32) syscall.Errno {
	if mode != 0 {
		return syscall.EOPNOTSUPP
	}
	return n.volume.reserveSpace(n.inode, int64(at), int64(size))
}

// Fsync implements both fsync and fdatasync in the same way: it makes the data and the length
// durable.
func (n *node) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	return n.volume.syncInode(n.inode)
}

func (n *node) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	n.volume.fillAttributes(n.inode, &out.Attr)
	return 0
}

func (n *node) Setattr(_ context.Context, _ fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if mode, ok := in.GetMode(); ok {
		n.volume.changeMode(n.inode, mode)
	}
	if size, ok := in.GetSize(); ok {
		if errno := n.volume.resizeFile(n.inode, int64(size)); errno != 0 {
			return errno
		}
	}
	n.volume.fillAttributes(n.inode, &out.Attr)
	return 0
}

func (n *node) Statfs(_ context.Context, out *fuse.StatfsOut) syscall.Errno {
	const unbounded = 1 << 40
	size := n.volume.faults.capacity()
	if size == 0 {
		size = unbounded
	}
	n.volume.mu.Lock()
	free := max(0, size-n.volume.used)
	n.volume.mu.Unlock()
	out.Bsize, out.Frsize, out.NameLen = blockBytes, blockBytes, 255
	out.Blocks, out.Bfree, out.Bavail = uint64(size/blockBytes), uint64(free/blockBytes), uint64(free/blockBytes)
	return 0
}
