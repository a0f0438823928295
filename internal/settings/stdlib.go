package settings

import (
	"flag"
	"slices"
)

// FromFlagSet returns the settings for the flags of a parsed flag set, except the named ones. kinds
// contains the kind of each flag that is a list, because a flag.Flag does not indicate that.
func FromFlagSet(fs *flag.FlagSet, kinds map[string]Kind, except ...string) []Flag {
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	var out []Flag
	fs.VisitAll(func(f *flag.Flag) {
		if slices.Contains(except, f.Name) {
			return
		}
		out = append(out, Flag{Name: f.Name, Kind: kindOf(f, kinds), OnCommandLine: given[f.Name],
			Set: func(s string) error { return fs.Set(f.Name, s) }})
	})
	return out
}

func kindOf(f *flag.Flag, kinds map[string]Kind) Kind {
	if k, ok := kinds[f.Name]; ok {
		return k
	}
	if g, ok := f.Value.(flag.Getter); ok {
		switch g.Get().(type) {
		case bool:
			return Bool
		case int, int64, uint, uint64:
			return Integer
		}
	}
	return Text
}
