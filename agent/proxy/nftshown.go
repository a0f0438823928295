package proxy

import (
	"encoding/binary"
	"errors"
	"hash/fnv"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// The kernel returns rules as code with a unique number per rule, not as the text that was written.
// The code is therefore read right after the text was written, and compared later. A rule that
// another program replaced differs in its code or its number.

// shownChain is the kernel's representation of an nftables chain.
type shownChain struct {
	rules  int
	digest uint64 // digest of the rules, in order
}

func (s shownChain) addRule(rule map[uint16][]byte) shownChain {
	h := fnv.New64a()
	_, _ = h.Write(rule[nftaRuleHandle])
	_, _ = h.Write(rule[nftaRuleCode])
	return shownChain{s.rules + 1, s.digest*31 + h.Sum64()}
}

// kernelRules reads the rules of an nftables chain from the kernel. If chain is "", it reads all
// chains of the table.
func kernelRules(f family, table, chain string) (map[string]shownChain, error) {
	out := map[string]shownChain{}
	request := []*nl.RtAttr{nl.NewRtAttr(nftaTable, nl.ZeroTerminated(table))}
	if chain != "" {
		request = append(request, nl.NewRtAttr(nftaName, nl.ZeroTerminated(chain)))
	}
	err := f.queryNFTables(nftGetRule, unix.NLM_F_DUMP, request, func(a map[uint16][]byte) {
		if name := cString(a[nftaName]); cString(a[nftaTable]) == table && (chain == "" || name == chain) {
			out[name] = out[name].addRule(a)
		}
	})
	return out, err
}

// isTableActive reports whether the table is active (not dormant) and all of its base chains have
// the policy accept.
func isTableActive(f family, table string) (bool, error) {
	ok := true
	request := []*nl.RtAttr{nl.NewRtAttr(nftaTable, nl.ZeroTerminated(table))}
	err := f.queryNFTables(nftGetChain, unix.NLM_F_DUMP, request, func(a map[uint16][]byte) {
		if p := a[nftaChainPolicy]; cString(a[nftaTable]) == table && len(p) == 4 &&
			binary.BigEndian.Uint32(p) != nftAccept {
			ok = false
		}
	})
	if err != nil {
		return false, err
	}
	err = f.queryNFTables(nftGetTable, 0, request, func(a map[uint16][]byte) {
		if flags := a[nftaTableFlags]; len(flags) == 4 && binary.BigEndian.Uint32(flags)&nftDormant != 0 {
			ok = false
		}
	})
	return ok, err
}

// shownRules are the kernel's representations of the chains of a table, as read right after the
// chains were written.
type shownRules struct {
	// nil: not supported, so rules are not compared
	read func(f family, table, chain string) (map[string]shownChain, error)

	chains           map[string]shownChain // by name; a chain that could not be read is missing
	written          []string              // chains that the current transaction writes
	intactGeneration uint32                // ruleset generation at which the table was last found intact
}

// recordChains reads from the kernel the representation of chains that were just written, and
// stores it for compareChains. Without names it reads all chains of the table.
func (s *shownRules) recordChains(f family, table string, names ...string) error {
	if s.read == nil {
		return nil
	}
	if len(names) == 0 {
		now, err := s.read(f, table, "")
		if err == nil {
			s.chains = now
		}
		return ignoreConcurrentChange(err)
	}
	for _, c := range names {
		now, err := s.read(f, table, c)
		if err != nil {
			return ignoreConcurrentChange(err)
		}
		s.chains[c] = now[c]
	}
	return nil
}

// ignoreConcurrentChange returns nil if err only means that the rules changed while they were read,
// and err otherwise. The next check reads the rules again.
func ignoreConcurrentChange(err error) error {
	if errors.Is(err, netlink.ErrDumpInterrupted) || errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// compareChains reports whether the kernel's rules of all chains are unchanged since they were
// written. want is the number of rules of each chain. If a chain could not be read right after it
// was written, only that number is compared, and the current rules are stored for the next call.
func (s *shownRules) compareChains(f family, table string, want map[string]int) (bool, error) {
	now, err := kernelRules(f, table, "")
	if err != nil || len(now) != len(want) {
		return false, err
	}
	for name, n := range want {
		was, known := s.chains[name]
		if now[name].rules != n || known && was != now[name] {
			return false, nil
		}
		s.chains[name] = now[name]
	}
	return isTableActive(f, table)
}
