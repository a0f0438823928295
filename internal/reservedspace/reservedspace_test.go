package reservedspace

import "testing"

// F115: the reserved space is a percentage or a size, and formatting returns the parsed text.
func TestFloor(t *testing.T) {
	const disk = 1000 << 30
	for text, want := range map[string]int64{
		"10%": 100 << 30, "1%": 10 << 30, "99%": 990 << 30, "2Gi": 2 << 30, "512Mi": 512 << 20, "3Ti": 3 << 40,
		"100": 100, "7Ki": 7 << 10,
	} {
		f, err := Parse(text)
		if err != nil || f.BytesOf(disk) != want || f.String() != text {
			t.Errorf("%s: %v, %d of %d, want %d", text, err, f.BytesOf(disk), int64(disk), want)
		}
		if again, err := Parse(f.Half().String()); err != nil || again != f.Half() ||
			again.BytesOf(disk) > f.BytesOf(disk) {
			t.Errorf("half of %s: %s, %v", text, f.Half(), err)
		}
	}
	for _, text := range []string{"", "0", "-1", "0%", "100%", "1.5%", "%", "Gi", "2G", "9999999Ti", "1 Gi",
		"Mi1", "1GiGi"} {
		if f, err := Parse(text); err == nil {
			t.Errorf("%q is parsed as %s", text, f)
		}
	}
	if f := (Amount{}); f.String() != "10%" || f.BytesOf(disk) != 100<<30 || f.CountOf(1000) != 100 ||
		f.Half() != Percent(5) {
		t.Errorf("none: %s, %d, %d, %s", f, f.BytesOf(disk), f.CountOf(1000), f.Half())
	}
	if n := Bytes(1 << 30).CountOf(1000); n != 0 {
		t.Errorf("a size reserves %d of 1,000 inodes", n)
	}
}
