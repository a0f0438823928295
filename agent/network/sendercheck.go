package network

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/knftables"

	"keelson.dev/keelson/cni"
	"keelson.dev/keelson/internal/nftables"
	"keelson.dev/keelson/internal/wakeup"
)

// Intervals of senderCheck.maintain.
const (
	rulesInterval = 5 * time.Second  // between checks for changes of nftables by other programs
	portsInterval = 30 * time.Second // between repairs of the bridge's ports and forwarding entries
)

// senderCheck maintains the nftables rules that drop packets of a pod on Keelson's own network if
// their source address does not belong to the pod. It disables MAC learning on the ports of these
// pods, and therefore also maintains the bridge's forwarding entries.
type senderCheck struct {
	recorded func() map[string]podPort // returns the attached pods by sandbox, including those of an earlier process
	log      *slog.Logger
	wake     wakeup.Signal // wakes maintain after a pod was removed

	mu      sync.Mutex
	wanted  map[string]podPort // by sandbox; nil: recorded has not been called yet
	version uint64             // version of wanted

	write             sync.Mutex // held while the kernel is changed or read
	nft               knftables.Interface
	applied           map[string]map[string]bool
	appliedVersion    uint64 // version of wanted in the kernel
	built             bool   // the table contains applied
	checkedGeneration uint32 // ruleset generation at the last successful check
	rules             string // digest of the rules at that check
}

func newSenderCheck(recorded func() map[string]podPort, log *slog.Logger) *senderCheck {
	return &senderCheck{recorded: recorded, log: log, wake: wakeup.New()}
}

// loadRecorded sets wanted to the result of recorded, if wanted is nil. The caller holds mu.
func (s *senderCheck) loadRecorded() {
	if s.wanted == nil {
		s.wanted = s.recorded()
		s.version++
	}
}

// addPort adds the sandbox's pod to the check. When it returns without an error, the kernel drops
// packets that the pod sends from addresses of others.
func (s *senderCheck) addPort(ctx context.Context, sandbox string, p podPort) error {
	s.mu.Lock()
	s.loadRecorded()
	s.wanted[sandbox] = p
	s.version++
	s.mu.Unlock()
	return errors.Join(s.syncTable(ctx), configurePort(p))
}

// removeSandbox removes the sandbox's pod from the check. It returns at once; maintain removes the
// pod's rules from the kernel later.
func (s *senderCheck) removeSandbox(sandbox string) {
	s.mu.Lock()
	s.loadRecorded()
	_, had := s.wanted[sandbox]
	delete(s.wanted, sandbox)
	if had {
		s.version++
	}
	s.mu.Unlock()
	if had {
		s.wake.Send()
	}
}

// syncTable updates the nftables table so that it checks the wanted pods and no others. Concurrent
// calls for the same version of wanted execute one transaction.
func (s *senderCheck) syncTable(ctx context.Context) error {
	s.write.Lock()
	defer s.write.Unlock()
	s.mu.Lock()
	s.loadRecorded()
	want, version := maps.Clone(s.wanted), s.version
	s.mu.Unlock()
	if s.built && s.appliedVersion == version {
		return nil
	}
	if s.nft == nil {
		nft, err := knftables.New(knftables.BridgeFamily, SenderTable)
		if err != nil {
			return fmt.Errorf("enforcing the source addresses of pods: %w: install nft and a kernel with "+
				"the bridge family "+
				"of nf_tables (CONFIG_NF_TABLES_BRIDGE), or exempt all namespaces: --source-check-exempt-namespaces=*",
				err)
		}
		s.nft = nft
	}
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	elements := senderElements(want)
	if s.built {
		tx := s.nft.NewTransaction()
		changeSenders(tx, s.applied, elements)
		if tx.NumOperations() == 0 || s.nft.Run(ctx, tx) == nil {
			s.applied, s.appliedVersion = elements, version
			return nil
		}
		s.built = false // another program changed the table
	}
	tx := s.nft.NewTransaction()
	buildSenders(tx, want)
	if err := s.nft.Run(ctx, tx); err != nil {
		return fmt.Errorf("enforcing the source addresses of pods: %w", err)
	}
	s.applied, s.appliedVersion, s.built, s.rules, s.checkedGeneration = elements, version, true, "", 0
	return nil
}

// maintain keeps the sender check in the kernel correct until ctx ends or an error occurs. It
// removes the rules of removed pods, and repairs the nftables table when another program has
// changed it. Every portsInterval it repairs the bridge's ports and their forwarding entries. The
// rules and entries remain when it returns.
func (s *senderCheck) maintain(ctx context.Context) error {
	look, ports := time.NewTicker(rulesInterval), time.NewTicker(portsInterval)
	defer look.Stop()
	defer ports.Stop()
	if err := s.repairPorts(); err != nil {
		return err
	}
	for {
		if err := s.syncTable(ctx); err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.wake:
		case <-look.C:
			if err := s.checkTable(ctx); err != nil && ctx.Err() == nil {
				return err
			}
		case <-ports.C:
			if err := s.repairPorts(); err != nil {
				return err
			}
		}
	}
}

// checkTable compares the nftables table in the kernel with the last state that was written. If
// they differ, the next syncTable rebuilds the table.
func (s *senderCheck) checkTable(ctx context.Context) error {
	s.write.Lock()
	defer s.write.Unlock()
	at, err := nftables.Generation()
	if err != nil || !s.built || at == s.checkedGeneration {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	elements, rules, err := listSenders(ctx)
	if err == nil {
		err = sendersDiffer(elements, s.applied)
	}
	if err == nil && s.rules != "" && rules != s.rules {
		err = errors.New("its rules differ from those that were written")
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn("the nftables table "+SenderTable+
			" was changed by another program and is rebuilt: does something flush nftables?",
			"err", err)
		s.built = false
		return nil
	}
	s.checkedGeneration, s.rules = at, rules
	return err
}

// sendersDiffer returns an error that describes the first difference between two sets of elements:
// the elements in the kernel and the elements that were written. It returns nil if they are equal.
func sendersDiffer(inKernel, written map[string]map[string]bool) error {
	for _, set := range senderSets {
		if inKernel[set.Name] == nil {
			return fmt.Errorf("set %s is missing", set.Name)
		}
		if !maps.Equal(inKernel[set.Name], written[set.Name]) {
			return fmt.Errorf("set %s has %d elements that are not the %d written", set.Name, len(inKernel[set.Name]),
				len(written[set.Name]))
		}
	}
	return nil
}

// listSenders reads the table SenderTable from the kernel. It returns the elements of its sets by
// set name, and a digest of its chains and rules.
func listSenders(ctx context.Context) (elements map[string]map[string]bool, rules string, err error) {
	raw, err := exec.CommandContext(ctx, "nft", "-j", "list", "table", "bridge", SenderTable).Output()
	if err != nil {
		return nil, "", fmt.Errorf("listing table %s: %w", SenderTable, err)
	}
	return parseSenders(raw)
}

// parseSenders parses the JSON output of nft for the table SenderTable. It returns the elements of
// the table's sets by set name, and a digest of its chains and rules.
func parseSenders(raw []byte) (elements map[string]map[string]bool, rules string, err error) {
	var listed struct {
		Nftables []struct {
			Chain, Rule json.RawMessage
			Set         *struct {
				Name string
				Elem []json.RawMessage
			}
		}
	}
	if err := json.Unmarshal(raw, &listed); err != nil {
		return nil, "", fmt.Errorf("reading table %s: %w", SenderTable, err)
	}
	elements = map[string]map[string]bool{}
	digest := sha256.New()
	for _, o := range listed.Nftables {
		digest.Write(o.Chain)
		digest.Write(o.Rule)
		if o.Set == nil {
			continue
		}
		elements[o.Set.Name] = map[string]bool{}
		for _, e := range o.Set.Elem {
			var one string
			var parts struct{ Concat []string }
			if json.Unmarshal(e, &one) != nil && json.Unmarshal(e, &parts) == nil {
				one = strings.Join(parts.Concat, " . ")
			}
			elements[o.Set.Name][one] = true
		}
	}
	return elements, hex.EncodeToString(digest.Sum(nil)), nil
}

// repairPorts configures all ports of the wanted pods again, and the settings of the bridge.
func (s *senderCheck) repairPorts() error {
	s.mu.Lock()
	s.loadRecorded()
	want := slices.Collect(maps.Values(s.wanted))
	s.mu.Unlock()
	errs := []error{refuseRedirects()}
	for _, p := range want {
		errs = append(errs, configurePort(p))
	}
	return errors.Join(errs...)
}

// configurePort configures the bridge port of a pod. It adds a sticky forwarding entry for the
// pod's MAC address, which no frame can move to another port. It disables MAC learning unless the
// pod is exempt. A missing port is not an error.
func configurePort(p podPort) error {
	link, err := netlink.LinkByName(p.Name)
	if err != nil || link.Attrs().MasterIndex == 0 {
		return nil
	}
	mac, err := net.ParseMAC(p.MAC)
	if err != nil {
		return fmt.Errorf("port %s: hardware address of the pod: %w", p.Name, err)
	}
	entry := &netlink.Neigh{LinkIndex: link.Attrs().Index, Family: unix.AF_BRIDGE, State: netlink.NUD_NOARP,
		Flags: netlink.NTF_MASTER | netlink.NTF_STICKY, HardwareAddr: mac}
	if err := netlink.NeighSet(entry); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("port %s: forwarding entry for %s: %w", p.Name, p.MAC, err)
	}
	if err := netlink.LinkSetLearning(link, p.Exempt); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("port %s: learning of hardware addresses: %w", p.Name, err)
	}
	return nil
}

// refuseRedirects makes the kernel ignore ICMP redirects and router advertisements that arrive on
// Keelson's bridge, because only pods could send them there.
func refuseRedirects() error {
	if _, err := netlink.LinkByName(cni.Bridge); err != nil {
		return nil
	}
	for _, path := range []string{"/proc/sys/net/ipv4/conf/" + cni.Bridge + "/accept_redirects",
		"/proc/sys/net/ipv6/conf/" + cni.Bridge + "/accept_redirects",
		"/proc/sys/net/ipv6/conf/" + cni.Bridge + "/accept_ra"} {
		raw, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) || err == nil && strings.TrimSpace(string(raw)) == "0" {
			continue // the kernel has no IPv6, or the setting is correct
		}
		if err := os.WriteFile(path, []byte("0"), 0o644); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("disabling ICMP redirects on bridge %s: %w", cni.Bridge, err)
		}
	}
	return nil
}

// removeSenders removes the nftables table SenderTable, so that no pod's source addresses are
// checked.
func removeSenders(ctx context.Context) error {
	nft, err := knftables.New(knftables.BridgeFamily, SenderTable)
	if err != nil {
		return nil // without nftables the table does not exist
	}
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	tx := nft.NewTransaction()
	tx.Add(&knftables.Table{})
	tx.Delete(&knftables.Table{})
	if err := nft.Run(ctx, tx); err != nil {
		return fmt.Errorf("removing table %s: %w", SenderTable, err)
	}
	return nil
}

// parsePort returns the pod's bridge port with its MAC address and its addresses, from the bridge
// plugin's result of ADD. It returns false if the port or the pod's interface is missing.
func parsePort(res types.Result) (p podPort, ok bool) {
	result, err := types100.GetResult(res)
	if err != nil {
		return p, false
	}
	for _, i := range result.Interfaces {
		switch {
		case i.Sandbox != "" && i.Name == ifName:
			p.MAC = strings.ToLower(i.Mac)
		case i.Sandbox == "" && portName.MatchString(i.Name):
			p.Name = i.Name
		}
	}
	for _, ip := range result.IPs {
		if a, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			p.Addresses = append(p.Addresses, a.Unmap())
		}
	}
	return p, p.Name != "" && p.MAC != ""
}

// recordedPorts returns the bridge ports of all pods that libcni's cache records as attached to
// Keelson's own network, by sandbox ID.
func (n *Network) recordedPorts() map[string]podPort {
	out := map[string]podPort{}
	attached, _ := n.cachedAttachments("") // unreadable records have no port
	for _, a := range attached {
		if a.list.Name != cni.Name {
			continue
		}
		cached, err := n.cni.GetNetworkListCachedResult(a.list, a.rt)
		if err != nil || cached == nil {
			continue
		}
		if p, ok := parsePort(cached); ok {
			for _, arg := range a.rt.Args {
				if arg[0] == namespaceArg {
					p.Exempt = n.isExempt(arg[1])
				}
			}
			out[a.rt.ContainerID] = p
		}
	}
	return out
}

// isExempt reports whether the pods of a namespace may send from any address.
func (n *Network) isExempt(namespace string) bool {
	return slices.Contains(n.cfg.SourceExempt, namespace) || n.checksNoSender()
}

// checksNoSender reports whether the pods of all namespaces are exempt from the check of source
// addresses.
func (n *Network) checksNoSender() bool { return slices.Contains(n.cfg.SourceExempt, "*") }

// checkSender makes the kernel check the source addresses of a pod that was attached to Keelson's
// own network. When it returns without an error, the check is active. res is the result of ADD. A
// pod in an exempt namespace may send from any address.
func (n *Network) checkSender(ctx context.Context, sandbox, namespace string, res types.Result) error {
	p, ok := parsePort(res)
	if !ok {
		return errors.New("the result of the bridge plugin names no port of the bridge or no eth0 of " +
			"the pod: install the plugins of this release")
	}
	if err := refuseRedirects(); err != nil {
		return err
	}
	if n.checksNoSender() {
		return nil
	}
	p.Exempt = n.isExempt(namespace)
	return n.senders.addPort(ctx, sandbox, p)
}

// MaintainSenderCheck maintains the check of the pods' source addresses until ctx ends or an error
// occurs. The rules remain in the kernel when it returns. If all namespaces are exempt, it removes
// the rules.
func (n *Network) MaintainSenderCheck(ctx context.Context) error {
	if n.checksNoSender() {
		if err := removeSenders(ctx); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}
	return n.senders.maintain(ctx)
}
