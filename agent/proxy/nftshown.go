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

// shown is the kernel's representation of a chain.
type shown struct {
	rules  int
	digest uint64 // digest of the rules, in order
}

func (s shown) and(rule map[uint16][]byte) shown {
	h := fnv.New64a()
	_, _ = h.Write(rule[nftaRuleHandle])
	_, _ = h.Write(rule[nftaRuleCode])
	return shown{s.rules + 1, s.digest*31 + h.Sum64()}
}

// kernelRules reads the rules of a chain, or those of all chains of a table if chain is "".
func kernelRules(f family, table, chain string) (map[string]shown, error) {
	out := map[string]shown{}
	request := []*nl.RtAttr{nl.NewRtAttr(nftaTable, nl.ZeroTerminated(table))}
	if chain != "" {
		request = append(request, nl.NewRtAttr(nftaName, nl.ZeroTerminated(chain)))
	}
	err := f.ask(nftGetRule, unix.NLM_F_DUMP, request, func(a map[uint16][]byte) {
		if name := cString(a[nftaName]); cString(a[nftaTable]) == table && (chain == "" || name == chain) {
			out[name] = out[name].and(a)
		}
	})
	return out, err
}

// sound reports whether the table is active (not dormant) and all of its base chains have the
// policy accept.
func sound(f family, table string) (bool, error) {
	ok := true
	request := []*nl.RtAttr{nl.NewRtAttr(nftaTable, nl.ZeroTerminated(table))}
	err := f.ask(nftGetChain, unix.NLM_F_DUMP, request, func(a map[uint16][]byte) {
		if p := a[nftaChainPolicy]; cString(a[nftaTable]) == table && len(p) == 4 && binary.BigEndian.Uint32(p) != nftAccept {
			ok = false
		}
	})
	if err != nil {
		return false, err
	}
	err = f.ask(nftGetTable, 0, request, func(a map[uint16][]byte) {
		if flags := a[nftaTableFlags]; len(flags) == 4 && binary.BigEndian.Uint32(flags)&nftDormant != 0 {
			ok = false
		}
	})
	return ok, err
}

// learn reads and stores the kernel's representation of chains that were just written. Without
// names it reads all chains.
func (t *nftTable) learn(chains ...string) error {
	if t.read == nil {
		return nil
	}
	if len(chains) == 0 {
		now, err := t.read(t.family, t.table, "")
		if err == nil {
			t.proven = now
		}
		return unsettled(err)
	}
	for _, c := range chains {
		now, err := t.read(t.family, t.table, c)
		if err != nil {
			return unsettled(err)
		}
		t.proven[c] = now[c]
	}
	return nil
}

// unsettled returns nil for an error that is caused by a concurrent change of rules. The next check
// reads the rules again.
func unsettled(err error) error {
	if errors.Is(err, netlink.ErrDumpInterrupted) || errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// compare reports whether all chains are unchanged since they were written. For a chain that could
// not be read then, the current representation is stored.
func (t *nftTable) compare() (bool, error) {
	now, err := kernelRules(t.family, t.table, "")
	if err != nil || len(now) != len(t.rules) {
		return false, err
	}
	for name, n := range t.rules {
		was, known := t.proven[name]
		if now[name].rules != n || known && was != now[name] {
			return false, nil
		}
		t.proven[name] = now[name]
	}
	return sound(t.family, t.table)
}
