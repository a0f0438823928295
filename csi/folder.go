package csi

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"

	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// maxSockets is how many sockets of a registration folder are looked at.
const maxSockets = 256

// Folder is a registration folder (kubelet's plugins_registry) looked at for plugins of one kind.
type Folder struct {
	Dir  string // "" = there is none
	Kind string // as registration.DRAPlugin
	// Came judges and takes over what registers at a socket; its error is told to the plugin.
	Came func(ctx context.Context, socket string, info *registration.PluginInfo) error
	Gone func(socket string) // what came there is no more; safe when nothing did
	Log  *slog.Logger

	scanning sync.Mutex
	seen     map[string]string // id of the socket's file, by socket
}

// Scan looks at the folder once. What does not answer is logged and tried again at the next scan.
func (f *Folder) Scan(ctx context.Context) {
	if f.Dir == "" {
		return
	}
	f.scanning.Lock()
	defer f.scanning.Unlock()
	sockets, err := filepath.Glob(filepath.Join(f.Dir, "*.sock"))
	if err != nil {
		return
	}
	if len(sockets) > maxSockets {
		f.Log.Warn("too many plugins register: the rest is not looked at", "folder", f.Dir, "sockets", len(sockets), "most", maxSockets)
		sockets = sockets[:maxSockets]
	}
	for s := range f.seen {
		if !slices.Contains(sockets, s) {
			delete(f.seen, s)
			f.Gone(s)
		}
	}
	for _, s := range sockets {
		id := FileID(s)
		if id == "" || f.seen[s] == id {
			continue
		}
		if _, err := Register(ctx, s, f.Kind, func(ctx context.Context, info *registration.PluginInfo) error {
			return f.Came(ctx, s, info)
		}); err != nil {
			f.Log.Warn("plugin does not register", "kind", f.Kind, "socket", s, "err", err)
			f.Gone(s) // what was behind it before, or came and does not know that it did
			continue
		}
		if f.seen == nil {
			f.seen = map[string]string{}
		}
		f.seen[s] = id
	}
}
