package settings

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"
)

// daemonFlags are the values of a small set of flags of every kind.
type daemonFlags struct {
	name  string
	loud  bool
	pods  int64
	every time.Duration
	hosts []string
	marks string
}

func flagsOf(d *daemonFlags, args ...string) []Flag {
	fs := flag.NewFlagSet("daemon", flag.ContinueOnError)
	fs.StringVar(&d.name, "node-name", "default", "")
	fs.BoolVar(&d.loud, "loud", true, "")
	fs.Int64Var(&d.pods, "max-pods", 110, "")
	fs.DurationVar(&d.every, "fence-after", time.Second, "")
	fs.Func("server", "", func(s string) error { d.hosts = append(d.hosts, s); return nil })
	fs.Func("marks", "", func(s string) error {
		if s == "bad" {
			return errors.New("not a valid mark")
		}
		d.marks = s
		return nil
	})
	fs.String("config", "", "")
	if err := fs.Parse(args); err != nil {
		panic(err)
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	kinds := map[string]Kind{"loud": Bool, "max-pods": Integer, "server": List, "marks": JoinedList}
	var all []Flag
	fs.VisitAll(func(f *flag.Flag) {
		if f.Name != "config" {
			all = append(all, Flag{Name: f.Name, Kind: kinds[f.Name], OnCommandLine: given[f.Name], Set: f.Value.Set})
		}
	})
	return append(all, Flag{Name: "of-another-verb", Kind: Integer})
}

// A number and a list of the file need other values than a text.
func TestKindOfAFlagsType(t *testing.T) {
	for name, want := range map[string]Kind{"bool": Bool, "int32": Integer, "int64": Integer, "uint16": Integer,
		"stringSlice": List,
		"stringArray": List, "stringToString": List, "string": Text, "duration": Text, "value": Text} {
		if got := KindOf(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

func lookupIn(of map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) { v, ok := of[name]; return v, ok }
}

func TestTheNearestSourceCounts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.yaml")
	file := "# all of it\nnode-name: file\nloud: false\nmax-pods: 7\nfence-after: 5s\nserver: [a, b]\nmarks:\n- " +
		"k=v\n- l=w\nof-another-verb: 3\n"
	if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	whole := daemonFlags{"file", false, 7, 5 * time.Second, []string{"a", "b"}, "k=v,l=w"}
	with := func(change func(*daemonFlags)) daemonFlags { d := whole; change(&d); return d }
	for _, c := range []struct {
		name string
		args []string
		env  map[string]string
		want daemonFlags
	}{
		{"the file", nil, nil, whole},
		{"the environment before the file", nil, map[string]string{"KEELSON_NODE_NAME": "env", "KEELSON_SERVER": "x, y",
			"KEELSON_MARKS": "m=1,n=2", "KEELSON_LOUD": "true", "KEELSON_OTHER": "1"},
			with(func(d *daemonFlags) {
				d.name, d.hosts, d.marks, d.loud = "env", []string{"x", "y"}, "m=1,n=2", true
			})},
		{"an empty variable counts as unset", nil, map[string]string{"KEELSON_NODE_NAME": ""}, whole},
		{"flags before environment and file", []string{"--node-name=flag", "--server=z", "--max-pods=1"},
			map[string]string{"KEELSON_NODE_NAME": "env", "KEELSON_SERVER": "x"},
			with(func(d *daemonFlags) { d.name, d.hosts, d.pods = "flag", []string{"z"}, 1 })},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got daemonFlags
			if err := Apply(flagsOf(&got, c.args...), File{Path: path, Required: true}, lookupIn(c.env)); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

// Each error names the file, the line and the key, and the remedy.
func TestWhatIsWrongInAFile(t *testing.T) {
	for file, want := range map[string]string{
		"node-name: a\nnode-nmae: b": `FILE, line 2: unknown key "node-nmae": the nearest is node-name`,
		"maxPods: 3":                 `FILE, line 1: unknown key "maxPods": the nearest is max-pods`,
		"max_pods: 3":                `FILE, line 1: unknown key "max_pods": the nearest is max-pods`,
		"entirely: other":            `FILE, line 1: unknown key "entirely": --help lists the keys`,
		"config: /etc/x":             `FILE, line 1: unknown key "config": --help lists the keys`,
		"loud: true\n\nloud: false":  `FILE, line 3: duplicate key loud: it is already set in line 1`,
		"max-pods: many":             `FILE, line 1: max-pods: want a whole number, not the text "many"`,
		"max-pods: '3'":              `FILE, line 1: max-pods: want a whole number, not the text "3"`,
		"max-pods: 3.5":              `FILE, line 1: max-pods: want a whole number, not "3.5"`,
		"max-pods: 99999999999999999999": `FILE, line 1: max-pods: want a whole number, not ` +
			`"99999999999999999999"`,
		"max-pods: 9223372036854775808": `FILE, line 1: max-pods: value out of range`,
		"loud: 1":                       `FILE, line 1: loud: want true or false, not "1"`,
		"loud: yes":                     `FILE, line 1: loud: want true or false, not the text "yes"`,
		"node-name: true":               `FILE, line 1: node-name: want text, not true (in quotes it is text)`,
		"node-name:": `FILE, line 1: node-name: want text, not nothing (leave the key out ` +
			`to use the default)`,
		"node-name: [a]":    `FILE, line 1: node-name: want text, not a list`,
		"node-name: {a: b}": `FILE, line 1: node-name: want text, not a mapping`,
		"server: a":         `FILE, line 1: server: want a list such as [a, b], not the text "a"`,
		"server: [[a]]":     `FILE, line 1: server: want text, not a list`,
		"server: ['a,b']": `FILE, line 1: server: "a,b": want a separate list ` +
			`entry for each value`,
		"marks: [bad]":      `FILE, line 1: marks: not a valid mark`,
		"fence-after: soon": `FILE, line 1: fence-after: parse error`,
		"of-another-verb: x": `FILE, line 1: of-another-verb: want a whole number, ` +
			`not the text "x"`,
		"node-name: &a x\nmarks: [*a]":           `FILE, line 2: marks: want text, not an alias`,
		"node-name: a\n---\nnode-name: b":        `FILE: more than one document: want one`,
		"- a":                                    `FILE, line 1: want lines of the form 'key: value'`,
		"node-name: a\n\tloud: b":                `FILE: line 2: found`,
		"? [a]\n: b":                             `FILE, line 1: unknown key ""`,
		"\"" + strings.Repeat("k", 99) + "\": 1": `FILE, line 1: unknown key "kkkk`,
		strings.Repeat("[", 2000):                `FILE: 2000 brackets are more than a configuration can have`,
		strings.Repeat(" ", MaxSize+1):           `is larger than 1048576 bytes`,
	} {
		path := filepath.Join(t.TempDir(), "agent.yaml")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		var d daemonFlags
		err := Apply(flagsOf(&d), File{Path: path}, lookupIn(nil))
		if err == nil || !strings.Contains(err.Error(), strings.ReplaceAll(want, "FILE", path)) {
			t.Errorf("%.60q: %v\nwant %s", file, err, want)
		} else if len(err.Error()) > 500 {
			t.Errorf("%.60q: an error of %d bytes", file, len(err.Error()))
		}
	}
}

func TestWhichFilesMustExist(t *testing.T) {
	dir := t.TempDir()
	empty, pipe := filepath.Join(dir, "empty"), filepath.Join(dir, "pipe")
	if err := errors.Join(os.WriteFile(empty, []byte("# nothing\n"), 0o600), syscall.Mkfifo(pipe, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		file File
		want string
	}{
		{File{}, ""},
		{File{Path: filepath.Join(dir, "none")}, ""},
		{File{Path: filepath.Join(dir, "none"), Required: true},
			"reading the configuration: stat " + dir + "/none: no such file"},
		{File{Path: empty, Required: true}, ""},
		{File{Path: dir}, dir + " is not a regular file"},
		{File{Path: pipe}, pipe + " is not a regular file"}, // the pipe has no writer
		{File{Path: "/dev/zero"}, "/dev/zero is not a regular file"},
	} {
		var d daemonFlags
		err := Apply(flagsOf(&d), c.file, lookupIn(nil))
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v, want %q", c.file, err, c.want)
		}
		if d.name != "default" {
			t.Errorf("%+v: the name is %q", c.file, d.name)
		}
	}
	var d daemonFlags
	if err := Apply(flagsOf(&d), File{}, lookupIn(map[string]string{"KEELSON_MAX_PODS": "x"})); err == nil ||
		!strings.HasPrefix(err.Error(), "KEELSON_MAX_PODS in the environment: ") {
		t.Errorf("a wrong number in the environment: %v", err)
	}
}

// Any content is parsed within bounds, and an error comes without entries.
func FuzzFile(f *testing.F) {
	for _, seed := range []string{"node-name: a", "server: [a, b]", "loud: true\nloud: true", "a: &a [*a]",
		"<<: {node-name: x}", "? ? ?", "%YAML 1.1\n---\n", "\xff\xfe", "!!binary x: y"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		var d daemonFlags
		entries, err := parseEntries(flagsOf(&d), content)
		if err != nil && (entries != nil || err.Error() == "") {
			t.Fatalf("%v together with %v", entries, err)
		}
		for key, e := range entries {
			if e.line < 1 || key == "" {
				t.Fatalf("key %q is in line %d", key, e.line)
			}
		}
	})
}

// processorTime returns the processor time of this process. Other work on the machine does not
// count.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var use syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &use); err != nil {
		t.Fatal(err)
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

// The inputs that cost a YAML parser most are rejected quickly.
func TestHostileFilesAreAnsweredSoon(t *testing.T) {
	half := MaxSize / 2
	for name, content := range map[string]string{
		"questions": strings.Repeat("? ", half), "dashes": strings.Repeat("- ", half),
		"indents": strings.Repeat("a:\n ", half/4),
		"keys": func() string {
			var b strings.Builder
			for i := 0; b.Len() < MaxSize-20; i++ {
				fmt.Fprintf(&b, "k%d: 1\n", i)
			}
			return b.String()
		}(),
		"anchors": strings.Repeat("&a ", half/3), "quotes": "'" + strings.Repeat("''", half/2),
		"colons": strings.Repeat(": ", half),
		"tabs":   "a:\n" + strings.Repeat("\t", half), "comments": strings.Repeat("#\n", half),
	} {
		t.Run(name, func(t *testing.T) {
			var d daemonFlags
			began := processorTime(t)
			_, err := parseEntries(flagsOf(&d), []byte(content))
			if took := processorTime(t) - began; took > 5*time.Second {
				t.Errorf("took %v", took)
			}
			if err == nil && name != "comments" {
				t.Error("was accepted")
			}
		})
	}
}
