package csi

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"

	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// maxSockets is the maximum number of sockets of a registration folder that are scanned.
const maxSockets = 256

// RegistrationFolder watches a plugin registration folder (the kubelet's plugins_registry) for
// plugins of one kind.
type RegistrationFolder struct {
	Dir  string // "": none exists
	Kind string // for example registration.DRAPlugin
	// OnRegister validates and accepts a plugin that registers at a socket. Its error is reported
	// to the plugin.
	OnRegister func(ctx context.Context, socket string, info *registration.PluginInfo) error
	OnRemove   func(socket string) // OnRemove is called when a plugin is gone; it must accept sockets that never registered
	Log        *slog.Logger

	scanning sync.Mutex
	seen     map[string]string // file ID of the socket, by path
}

// Scan scans the folder once. Sockets that do not respond are logged, and tried again by the next
// scan.
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
		f.Log.Warn("too many registration sockets: the rest is ignored", "folder", f.Dir, "sockets", len(sockets), "most", maxSockets)
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
			f.OnRemove(s) // the previous plugin, or a plugin with a lost registration status
			continue
		}
		if f.seen == nil {
			f.seen = map[string]string{}
		}
		f.seen[s] = id
	}
}
