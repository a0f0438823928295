package csi

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"

	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// maxSockets is the maximum number of sockets in a registration folder that Scan reads.
const maxSockets = 256

// RegistrationFolder finds plugins of one kind by their sockets in a folder, like the kubelet in
// its folder plugins_registry.
type RegistrationFolder struct {
	Dir  string // the folder; "": Scan does nothing
	Kind string // plugin type, such as registration.DRAPlugin
	// OnRegister validates and accepts a plugin that registers at a socket. Its error is reported
	// to the plugin.
	OnRegister func(ctx context.Context, socket string, info *registration.PluginInfo) error
	OnRemove   func(socket string) // called when a plugin's socket is gone, even if the plugin never registered
	Log        *slog.Logger

	scanning sync.Mutex
	seen     map[string]string // socket path → FileID of the registered socket
}

// Scan registers the plugins at new sockets in the folder, and calls OnRemove for sockets that are
// gone. A plugin that does not respond is logged, and the next Scan tries it again.
func (f *RegistrationFolder) Scan(ctx context.Context) {
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
		f.Log.Warn("too many registration sockets: the rest is ignored", "folder", f.Dir, "sockets", len(sockets),
			"most", maxSockets)
		sockets = sockets[:maxSockets]
	}
	for s := range f.seen {
		if !slices.Contains(sockets, s) {
			delete(f.seen, s)
			f.OnRemove(s)
		}
	}
	for _, s := range sockets {
		id := FileID(s)
		if id == "" || f.seen[s] == id {
			continue
		}
		if _, err := Register(ctx, s, f.Kind, func(ctx context.Context, info *registration.PluginInfo) error {
			return f.OnRegister(ctx, s, info)
		}); err != nil {
			f.Log.Warn("plugin registration failed", "kind", f.Kind, "socket", s, "err", err)
			f.OnRemove(s) // a previous plugin, or one that received no status
			continue
		}
		if f.seen == nil {
			f.seen = map[string]string{}
		}
		f.seen[s] = id
	}
}
