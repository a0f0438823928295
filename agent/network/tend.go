package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/cni"
)

// recordAttached records whether the sandbox is attached, or is being attached, by this process.
func (n *Network) recordAttached(sandboxID string, attached bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if attached {
		n.attached[sandboxID] = true
	} else {
		delete(n.attached, sandboxID)
	}
}

// cachedAttachment is the CNI configuration and the runtime arguments with which a sandbox was
// attached, from libcni's cache.
type cachedAttachment struct {
	list *libcni.NetworkConfigList
	rt   *libcni.RuntimeConf
}

// cachedAttachments returns the attachments of a sandbox from libcni's cache. An empty sandboxID
// selects all sandboxes. Unreadable attachments are omitted and returned as an error.
func (n *Network) cachedAttachments(sandboxID string) ([]cachedAttachment, error) {
	cached, err := n.cni.GetCachedAttachments(sandboxID)
	if err != nil {
		return nil, nil // the cache does not exist
	}
	var out []cachedAttachment
	var errs []error
	for _, a := range cached {
		list, err := libcni.NetworkConfFromBytes(a.Config)
		if err != nil {
			errs = append(errs, fmt.Errorf("cached configuration of sandbox %s: %w", sandboxID, err))
			continue
		}
		out = append(out, cachedAttachment{list,
			&libcni.RuntimeConf{ContainerID: a.ContainerID, NetNS: a.NetNS, IfName: a.IfName,
				Args: a.CniArgs, CapabilityArgs: a.CapabilityArgs}})
	}
	return out, errors.Join(errs...)
}

// Check calls the CNI verb CHECK with the configuration that attached the sandbox. It returns an
// error if the attachment is damaged.
func (n *Network) Check(ctx context.Context, r agent.NetworkRequest) error {
	ctx, cancel := n.withDeadline(ctx, "CHECK")
	defer cancel()
	attached, err := n.cachedAttachments(r.SandboxID)
	if err != nil {
		return err
	}
	if len(attached) == 0 {
		list, err := n.activeConfiguration(len(portMappings(r)) > 0)
		if err != nil {
			return err
		}
		attached = []cachedAttachment{{list, runtimeConf(r)}}
	}
	var errs []error
	for _, a := range attached {
		if err := n.cni.CheckNetworkList(ctx, a.list, a.rt); err != nil && !lacksCheckVerb(a.list) {
			errs = append(errs, fmt.Errorf("network %q: CNI CHECK for pod %s/%s: %w", a.list.Name,
				r.Namespace, r.Name, err))
		}
	}
	return errors.Join(errs...)
}

// lacksCheckVerb reports whether the configuration's CNI version is older than the verb CHECK.
// libcni returns an error for such a version.
func lacksCheckVerb(list *libcni.NetworkConfigList) bool {
	switch list.CNIVersion {
	case "", "0.1.0", "0.2.0", "0.3.0", "0.3.1":
		return true
	}
	return false
}

// Del detaches the sandbox with the CNI verb DEL and the cached configuration of its attachment. If
// the cache has no attachment, it calls DEL with the active configuration, because an agent may
// have crashed during ADD.
func (n *Network) Del(ctx context.Context, r agent.NetworkRequest) (err error) {
	ctx, cancel := n.withDeadline(ctx, "DEL")
	defer cancel()
	n.recordAttached(r.SandboxID, false)
	defer func() {
		if err == nil { // after a failed DEL the port may still exist and must still be checked
			n.senders.removeSandbox(r.SandboxID)
		}
	}()
	attached, err := n.cachedAttachments(r.SandboxID)
	if err != nil || len(attached) > 0 {
		errs := []error{err}
		for _, a := range attached {
			port := n.hostVeth(a)
			err := n.cni.DelNetworkList(ctx, a.list, a.rt)
			if err == nil {
				err = removePort(port)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("network %q: CNI DEL for pod %s/%s: %w", a.list.Name,
					r.Namespace, r.Name, err))
			}
		}
		return errors.Join(errs...)
	}
	list, err := n.activeConfiguration(len(portMappings(r)) > 0)
	if err != nil {
		return nil // without a configuration, nothing was attached
	}
	if err := n.undoAdd(ctx, list, runtimeConf(r)); err != nil {
		return fmt.Errorf("network %q: CNI DEL for pod %s/%s: %w", list.Name, r.Namespace, r.Name, err)
	}
	return nil
}

// GC releases the attachments of sandboxes that are neither in keep nor attached by this process.
// First it calls DEL for such sandboxes in libcni's cache. It also calls DEL for such sandboxes
// that hold an address of Keelson's own network, because the bridge and host-local plugins have no
// GC verb. Then it removes unrecorded ports of Keelson's bridge, and with them the other ends of
// the veth pairs. Finally it calls the GC verb of the plugins. The last two steps are skipped while
// a sandbox is being attached.
func (n *Network) GC(ctx context.Context, keep []string) error {
	var errs []error
	attached, err := n.cni.GetCachedAttachments("")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, fmt.Errorf("reading cached attachments: %w", err))
	}
	lost := n.addressHolders()
	// after the lists were read: a listed sandbox that was not attached before is garbage
	wanted := n.keptSandboxes(keep)
	for _, a := range attached {
		if !wanted[a.ContainerID] {
			errs = append(errs, n.Del(ctx, agent.NetworkRequest{SandboxID: a.ContainerID, NetNS: a.NetNS}))
			delete(lost, a.ContainerID)
		}
	}
	for id := range lost {
		if !wanted[id] {
			errs = append(errs, n.Del(ctx, agent.NetworkRequest{SandboxID: id}))
		}
	}
	return errors.Join(append(errs, n.collectGarbage(ctx, keep))...)
}

func (n *Network) keptSandboxes(keep []string) map[string]bool {
	wanted := map[string]bool{}
	n.mu.Lock()
	defer n.mu.Unlock()
	for id := range n.attached {
		wanted[id] = true
	}
	for _, id := range keep {
		wanted[id] = true
	}
	return wanted
}

// collectGarbage removes bridge ports without a sandbox, and calls the GC verb of the active
// configuration's plugins. keep are the IDs of existing sandboxes. It does nothing while a sandbox
// is being attached.
func (n *Network) collectGarbage(ctx context.Context, keep []string) error {
	if !n.adding.TryLock() {
		return nil
	}
	defer n.adding.Unlock()
	return errors.Join(n.collectPorts(keep), n.collectByPlugins(ctx, keep))
}

func (n *Network) collectByPlugins(ctx context.Context, keep []string) error {
	list, err := n.activeConfiguration(false)
	if err != nil {
		return nil // without a configuration there are no plugins
	}
	ctx, cancel := n.withDeadline(ctx, "GC")
	defer cancel()
	args := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{}}
	for id := range n.keptSandboxes(keep) {
		args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: id, IfName: ifName})
	}
	if err := n.cni.GCNetworkList(ctx, list, args); err != nil {
		return fmt.Errorf("network %q: CNI GC: %w", list.Name, err)
	}
	return nil
}

// addressHolders returns the IDs of the sandboxes that hold an address of Keelson's own network.
// The IPAM plugin stores one file per address, with the sandbox's ID in its first line.
func (n *Network) addressHolders() map[string]bool {
	out := map[string]bool{}
	files, err := filepath.Glob(filepath.Join(n.ipamDir(), cni.Name, "*"))
	if err != nil {
		return out
	}
	for _, f := range files {
		if _, err := netip.ParseAddr(filepath.Base(f)); err != nil {
			continue
		}
		if raw, err := os.ReadFile(f); err == nil {
			if id, _, _ := strings.Cut(string(raw), "\n"); strings.TrimSpace(id) != "" {
				out[strings.TrimSpace(id)] = true
			}
		}
	}
	return out
}
