package proxy

import (
	"encoding/binary"
	"errors"
	"hash/fnv"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// What is written is text, and what the kernel shows is code and a number for each rule, which it gives once. What it shows
// is therefore read right after the text was written, and compared later: rules that somebody replaced differ in one or both.

// shown is what the kernel shows of a chain.
type shown struct {
	rules  int
	digest uint64 // of its rules, in order
}

func (s shown) and(rule map[uint16][]byte) shown {
	h := fnv.New64a()
	_, _ = h.Write(rule[nftaRuleHandle])
	_, _ = h.Write(rule[nftaRuleCode])
	return shown{s.rules + 1, s.digest*31 + h.Sum64()}
}

// kernelRules reads the rules of a chain, or of all chains of a table where it is "".
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

// sound says that the table is not asleep, and that none of its chains drops what no rule decides.
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

// learn reads what the kernel shows of chains that were just written: of all where none is named.
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

// unsettled passes over what only means that somebody changes rules at this moment: the next look reads again.
func unsettled(err error) error {
	if errors.Is(err, netlink.ErrDumpInterrupted) || errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// compare says whether the chains are those that were written. Of one that could not be read then, what is shown now counts.
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
